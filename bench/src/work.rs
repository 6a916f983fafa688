//! How much is measured, and how often.

use clap::Args;

/// How much a bench does.
#[derive(Debug, Clone, Args)]
pub struct Work {
    /// How often the work is done one at a time.
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// How much is done at once, one burst for each number; each bench has its own default.
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=10_000))]
    bursts: Vec<u32>,
    /// How often it is done before anything is measured.
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    warm_up: u32,
    /// How often each burst is measured; what was seen in all of them is one set of samples.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

impl Work {
    /// How often, one at a time.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// How often before anything is measured.
    pub fn warm_up(&self) -> usize {
        self.warm_up as usize
    }

    /// How often each burst is measured.
    pub fn rounds(&self) -> usize {
        self.rounds as usize
    }

    /// How much at once, or what a bench does by default.
    pub fn bursts(&self, default: &[usize]) -> Vec<usize> {
        match self.bursts.is_empty() {
            true => default.to_vec(),
            false => self.bursts.iter().map(|burst| *burst as usize).collect(),
        }
    }
}

/// What a case is called in which so much is done at once.
pub fn case(burst: usize) -> String {
    format!("burst{burst}")
}
