//! Difference between the clock of this host and that of the API server, from its `Date` header.

use http::Request;
use jiff::{SignedDuration, Timestamp};
use kube::client::Body;

use super::finding::Finding;
use crate::clusters::{Cluster, Tier};
use crate::error::Error;

/// Difference that is reported. The header has a resolution of one second.
const TOLERANCE: SignedDuration = SignedDuration::from_secs(5);

/// Checks the clock of a cluster.
pub async fn check(cluster: &Cluster) -> Result<Finding, Error> {
    let request =
        Request::get("/version").body(Body::empty()).map_err(|error| Error::Encode(error.to_string()))?;
    let answer = cluster.client.send(request).await;
    let answer = answer.map_err(|error| Error::request(cluster.tier.name(), "/version", &error))?;
    let date = answer.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
    let server = date.and_then(|date| jiff::fmt::rfc2822::parse(date).ok()).map(|time| time.timestamp());
    Ok(judge(cluster.tier, server, Timestamp::now()))
}

fn judge(tier: Tier, server: Option<Timestamp>, local: Timestamp) -> Finding {
    let what = "clock of the API server";
    let Some(server) = server else { return Finding::skipped(tier, what).because("it sent no date") };
    let difference = server.duration_since(local);
    let text = format!("{}s from this host's", difference.as_secs());
    match difference.abs() > TOLERANCE {
        true => Finding::warning(tier, what)
            .because(text)
            .next("synchronize the clocks: ages and certificates are judged by them"),
        false => Finding::ok(tier, what).because(text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn a_difference_of_more_than_seconds_is_reported() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let level = |seconds| judge(Tier::Guest, Some(now + SignedDuration::from_secs(seconds)), now).level;
        assert_eq!((level(-1), level(4), level(-60)), (Level::Ok, Level::Ok, Level::Warning));
        assert_eq!(judge(Tier::Guest, None, now).level, Level::Skipped);
        assert!(jiff::fmt::rfc2822::parse("Mon, 23 Nov 2026 15:00:00 GMT").is_ok());
    }
}
