//! Flags of leader election.

use std::path::Path;
use std::time::Duration;

use kube::Client;
use process_kit::duration;
use prometheus_client::registry::Registry;

use super::Election;

/// File with the namespace of the pod.
const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Flags of leader election.
#[derive(Debug, Clone, clap::Args)]
pub struct LeaseArgs {
    /// Run the reconcilers only in the replica that holds the Lease; all replicas serve calls. Without a namespace for the
    /// Lease, leader election is disabled, and only one replica may run.
    #[arg(long, action = clap::ArgAction::Set, default_value_t = true, value_name = "BOOL")]
    leader_elect: bool,
    /// Namespace of the Lease. [default: the pod's namespace, if no kubeconfig is given]
    #[arg(long, value_name = "NAMESPACE")]
    lease_namespace: Option<String>,
    /// Time without a renewal after which another replica may acquire the Lease.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = duration::parse_timeout)]
    lease_duration: Duration,
    /// Time without a successful renewal after which the leader stops: less than the lease duration.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse_timeout)]
    lease_renew_deadline: Duration,
    /// Interval of renewals: less than half of the renew deadline.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration::parse_timeout)]
    lease_retry_period: Duration,
}

/// Timings of leader election.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timings {
    /// Time without a renewal after which another replica may acquire the Lease.
    pub(super) duration: Duration,
    /// Time without a successful renewal after which the leader stops.
    pub(super) renew_deadline: Duration,
    /// Interval of renewals.
    pub(super) retry_period: Duration,
}

impl Timings {
    /// Time limit of a request: allows one retry before the deadline.
    pub(super) fn attempt(&self) -> Duration {
        self.renew_deadline / 2
    }
}

impl LeaseArgs {
    /// Creates the election by the Lease `component` in the cluster of `client`. If `kubeconfig` is given, the pod's namespace
    /// is not used, because the pod may run in another cluster. Fails if the timings are inconsistent.
    pub fn election(
        &self,
        component: &'static str,
        client: &Client,
        kubeconfig: Option<&Path>,
        registry: &mut Registry,
    ) -> Result<Election, String> {
        let (namespace, timings) = self.read(kubeconfig)?;
        if namespace.is_none() {
            tracing::info!("leader election is disabled: only one replica may run");
        }
        Ok(Election::new(component, client, namespace, timings, registry))
    }

    fn read(&self, kubeconfig: Option<&Path>) -> Result<(Option<String>, Timings), String> {
        let timings = Timings {
            duration: self.lease_duration,
            renew_deadline: self.lease_renew_deadline,
            retry_period: self.lease_retry_period,
        };
        if timings.renew_deadline >= timings.duration {
            return Err(format!(
                "--lease-renew-deadline {} must be less than --lease-duration {}: otherwise two replicas could be leader at the same time",
                duration::show(self.lease_renew_deadline),
                duration::show(self.lease_duration)
            ));
        }
        if timings.retry_period * 2 >= timings.renew_deadline {
            return Err(format!(
                "--lease-retry-period {} must be less than half of --lease-renew-deadline {}: otherwise one failed request \
                 could end the leadership",
                duration::show(self.lease_retry_period),
                duration::show(self.lease_renew_deadline)
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
    fn the_election_is_enabled_if_it_has_a_namespace_and_is_not_disabled() {
        assert_eq!(read(&[]).unwrap().0, None);
        assert_eq!(read(&["--lease-namespace=a"]).unwrap().0.as_deref(), Some("a"));
        assert_eq!(read(&["--lease-namespace=a", "--leader-elect=false"]).unwrap().0, None);
    }

    #[test]
    fn timings_that_permit_two_leaders_are_refused() {
        let (_, timings) = read(&[]).unwrap();
        assert_eq!((timings.duration.as_secs(), timings.retry_period.as_secs()), (15, 2));
        assert!(read(&["--lease-duration=10s"]).unwrap_err().contains("--lease-duration 10s"));
        assert!(read(&["--lease-retry-period=5s"]).unwrap_err().contains("--lease-retry-period 5s"));
        assert!(
            read(&["--lease-duration=5s", "--lease-renew-deadline=3s", "--lease-retry-period=1s"]).is_ok()
        );
    }
}
