//! Statistics of samples.

use std::time::Duration;

/// Statistics of a set of samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Stats {
    pub(crate) n: usize,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Stats {
    /// The statistics of durations, in milliseconds.
    pub(crate) fn of_times(times: &[Duration]) -> Option<Self> {
        Self::of(times.iter().map(|time| time.as_secs_f64() * 1000.0).collect())
    }

    /// `None` without samples. Percentiles are samples (nearest rank), never interpolated.
    pub(crate) fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        let rank = |percent: usize| {
            let rank = (samples.len() * percent).div_ceil(100).max(1);
            samples.get(rank - 1).copied()
        };
        Some(Self { n: samples.len(), p50: rank(50)?, p90: rank(90)?, p99: rank(99)?, max: rank(100)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let samples = (1..=20).rev().map(f64::from).collect();
        let stats = Stats::of(samples).unwrap();
        assert_eq!(stats, Stats { n: 20, p50: 10.0, p90: 18.0, p99: 20.0, max: 20.0 });
        assert_eq!(Stats::of(vec![]), None);
        assert_eq!(Stats::of(vec![7.0]).unwrap().p50, 7.0);
    }
}
