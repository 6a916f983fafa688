//! Amount of work of a bench.

use clap::Args;

/// Amount of work of a bench.
#[derive(Debug, Clone, Args)]
pub struct Work {
    /// Number of repetitions, one at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// Sizes of bursts of concurrent operations; each bench has its own default.
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=10_000))]
    bursts: Vec<u32>,
    /// Number of unmeasured repetitions before the measurement.
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    warm_up: u32,
    /// Number of repetitions of each burst; all of them are one set of samples.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

impl Work {
    /// Number of repetitions, one at a time.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// Number of unmeasured repetitions before the measurement.
    pub fn warm_up(&self) -> usize {
        self.warm_up as usize
    }

    /// Number of repetitions of each burst.
    pub fn rounds(&self) -> usize {
        self.rounds as usize
    }

    /// Sizes of bursts, or the bench's default.
    pub fn bursts(&self, default: &[usize]) -> Vec<usize> {
        match self.bursts.is_empty() {
            true => default.to_vec(),
            false => self.bursts.iter().map(|burst| *burst as usize).collect(),
        }
    }
}

/// Name of the case of a burst.
pub fn case(burst: usize) -> String {
    format!("burst{burst}")
}
