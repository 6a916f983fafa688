//! The flags of leader election.

use std::path::Path;
use std::time::Duration;

use kube::Client;
use prometheus_client::registry::Registry;

use super::Election;

/// Where a pod finds the namespace that it runs in.
const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Which replica runs the reconcilers.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaseArgs {
    /// Run reconcilers only in the replica that holds a Lease; calls are served by all. Without a namespace for the
    /// Lease, there is no election, and there must be one replica only.
    #[arg(long, action = clap::ArgAction::Set, default_value_t = true, value_name = "BOOL")]
    leader_elect: bool,
    /// Namespace of the Lease; where no kubeconfig is given, that of the pod.
    #[arg(long, value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
    /// How long the Lease must rest before another replica takes it, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = seconds())]
    lease_duration: u64,
    /// How long the leader tries to renew the Lease before it stops, in seconds: less than the duration.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = seconds())]
    lease_renew_deadline: u64,
    /// How often the leader renews the Lease, in seconds: less than half of the deadline.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = seconds())]
    lease_retry_period: u64,
}

fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=3600)
}

/// How long things take in an election.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timings {
    /// How long the Lease must rest before another takes it.
    pub(super) duration: Duration,
    /// How long the leader goes on without a renewal.
    pub(super) renew_deadline: Duration,
    /// How often it renews.
    pub(super) retry_period: Duration,
}

impl Timings {
    /// How long one request may take: a renewal can be tried again before the deadline.
    pub(super) fn attempt(&self) -> Duration {
        self.renew_deadline / 2
    }
}

impl LeaseArgs {
    /// The election by a Lease called `component` in the cluster of `client`. `kubeconfig` is what that was made from:
    /// with one, the pod's own namespace may be of another cluster. Fails where the timings don't go together.
    pub fn election(
        &self,
        component: &'static str,
        client: &Client,
        kubeconfig: Option<&Path>,
        registry: &mut Registry,
    ) -> Result<Election, String> {
        let (namespace, timings) = self.read(kubeconfig)?;
        if namespace.is_none() {
            tracing::info!("no leader election: there must be no other replica");
        }
        Ok(Election::new(component, client, namespace, timings, registry))
    }

    fn read(&self, kubeconfig: Option<&Path>) -> Result<(Option<String>, Timings), String> {
        let timings = Timings {
            duration: Duration::from_secs(self.lease_duration),
            renew_deadline: Duration::from_secs(self.lease_renew_deadline),
            retry_period: Duration::from_secs(self.lease_retry_period),
        };
        if timings.renew_deadline >= timings.duration {
            return Err(format!(
                "--lease-renew-deadline {} must be less than --lease-duration {}: else two replicas could lead at once",
                self.lease_renew_deadline, self.lease_duration
            ));
        }
        if timings.retry_period * 2 >= timings.renew_deadline {
            return Err(format!(
                "--lease-retry-period {} must be less than half of --lease-renew-deadline {}: else one lost request \
                 ends the lead",
                self.lease_retry_period, self.lease_renew_deadline
            ));
        }
        let namespace = self.lease_namespace.clone().or_else(|| {
            let own = std::fs::read_to_string(OWN_NAMESPACE).ok().filter(|_| kubeconfig.is_none());
            own.map(|own| own.trim().to_owned())
        });
        Ok((namespace.filter(|namespace| self.leader_elect && !namespace.is_empty()), timings))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        lease: LeaseArgs,
    }

    fn read(words: &[&str]) -> Result<(Option<String>, Timings), String> {
        let words = ["program"].iter().chain(words);
        Cli::try_parse_from(words).unwrap().lease.read(Some(Path::new("a kubeconfig")))
    }

    #[test]
    fn there_is_an_election_where_a_namespace_is_known_and_it_is_not_switched_off() {
        assert_eq!(read(&[]).unwrap().0, None);
        assert_eq!(read(&["--lease-namespace=a"]).unwrap().0.as_deref(), Some("a"));
        assert_eq!(read(&["--lease-namespace=a", "--leader-elect=false"]).unwrap().0, None);
    }

    #[test]
    fn timings_by_which_two_could_lead_are_refused() {
        let (_, timings) = read(&[]).unwrap();
        assert_eq!((timings.duration.as_secs(), timings.retry_period.as_secs()), (15, 2));
        assert!(read(&["--lease-duration=10"]).unwrap_err().contains("--lease-duration 10"));
        assert!(read(&["--lease-retry-period=5"]).unwrap_err().contains("--lease-retry-period 5"));
        assert!(read(&["--lease-duration=5", "--lease-renew-deadline=3", "--lease-retry-period=1"]).is_ok());
    }
}
