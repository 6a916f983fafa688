//! `trace`: gathers, diagnoses and prints, once or until the volume is healthy.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::cli::TraceArgs;
use crate::clusters::Clusters;
use crate::diagnose::{Report, diagnose};
use crate::error::Error;
use crate::gather::gather;
use crate::render::{self, has_colour, print};

/// Interval of `--watch`: a trace is a handful of reads by name.
const INTERVAL: Duration = Duration::from_secs(1);

/// Runs `trace`. Returns whether the volume is healthy.
pub async fn run(clusters: &Clusters, args: &TraceArgs) -> Result<bool, Error> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    let mut shown: Option<Report> = None;
    loop {
        let next = Instant::now() + INTERVAL;
        let report = once(clusters, args, shown.as_ref()).await?;
        let is_over = deadline.is_some_and(|deadline| next > deadline);
        if report.healthy || !args.watch || is_over {
            return Ok(report.healthy);
        }
        shown = Some(report);
        sleep_until(next).await;
    }
}

/// Prints the report if it differs from the one before.
async fn once(clusters: &Clusters, args: &TraceArgs, before: Option<&Report>) -> Result<Report, Error> {
    let snapshot = gather(clusters, &args.subject).await?;
    let report = diagnose(&snapshot);
    if before != Some(&report) {
        let text = |is_wide| render::trace::text(&report, snapshot.now, is_wide, has_colour());
        let separator = if before.is_some() { "\n" } else { "" };
        print(&format!("{separator}{}", render::format(args.output, &report, text)?))?;
    }
    Ok(report)
}
