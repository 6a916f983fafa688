//! Attempts of a hostile guest, and what must stop them.

use std::fmt;

use anyhow::{Result, ensure};
use futures::future::BoxFuture;

use super::request::Request;
use super::site::Site;

/// Where attacker and victim are, and whether admission policies apply to the attacker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Setting {
    /// Whether both guests share a namespace of the management cluster.
    pub(super) shared: bool,
    /// Whether admission policies apply.
    pub(super) policies: bool,
}

/// All settings, in the order of [`Expected`].
pub(super) const SETTINGS: [Setting; 4] = [
    Setting { shared: false, policies: true },
    Setting { shared: false, policies: false },
    Setting { shared: true, policies: true },
    Setting { shared: true, policies: false },
];

/// What stops an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The guest's Role does not permit the request.
    Rbac,
    /// An admission policy.
    Policy,
    /// The API server's own validation, or the schema of a custom resource.
    ApiServer,
    /// A controller or sidecar of Kubernetes.
    Kubernetes,
    /// vm-operator-shim.
    VmOperator,
    /// mgmt-csi.
    MgmtCsi,
    /// gc-csi.
    GcCsi,
    /// gc-csi-node.
    GcCsiNode,
    /// The gRPC server of a driver.
    GrpcServer,
    /// The storage infra, in the TLS handshake.
    Tls,
    /// The storage infra, by the client's certificate.
    StorageInfra,
    /// The network of the VM.
    Network,
    /// The hypervisor.
    Hypervisor,
}

/// What must come of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is refused.
    Refused(By),
    /// It is not refused, and affects no other guest, for this reason.
    Bounded(&'static str),
    /// It affects another guest. This is why nothing stops it.
    NotPrevented(&'static str),
}

/// Outcomes by [`SETTINGS`].
pub(super) type Expected = [Outcome; 4];

/// What came of an attempt.
#[derive(Debug, Clone)]
pub(super) enum Seen {
    /// It was refused, with this message.
    Refused(By, String),
    /// It was not refused.
    Permitted,
}

/// Something that a hostile guest tries.
pub(super) struct Attempt<Act> {
    /// What it does, in the infinitive.
    pub(super) name: &'static str,
    /// How.
    pub(super) act: Act,
    /// What must come of it.
    pub(super) expected: Expected,
}

/// An attempt with the guest's credential at the API server of the management cluster.
pub(super) enum Act {
    /// One request. It is only a dry run where it is expected to be permitted.
    Request(fn(&Site) -> Request),
    /// Several steps.
    Steps(for<'a> fn(&'a Site) -> BoxFuture<'a, Result<Seen>>),
}

/// An attempt of one request.
pub(super) fn request(name: &'static str, of: fn(&Site) -> Request, expected: Expected) -> Attempt<Act> {
    Attempt { name, act: Act::Request(of), expected }
}

/// An attempt of several steps.
pub(super) fn steps(
    name: &'static str,
    of: for<'a> fn(&'a Site) -> BoxFuture<'a, Result<Seen>>,
    expected: Expected,
) -> Attempt<Act> {
    Attempt { name, act: Act::Steps(of), expected }
}

/// The same outcome in all settings.
pub(super) const fn everywhere(outcome: Outcome) -> Expected {
    [outcome; 4]
}

/// Outcomes of a request that the Role of the guest permits, with policies and without.
pub(super) const fn own(with: Outcome, without: Outcome) -> Expected {
    [with, without, with, without]
}

/// Outcomes of a request about an object of another guest: RBAC refuses it in another namespace.
pub(super) const fn foreign(with: Outcome, without: Outcome) -> Expected {
    [Outcome::Refused(By::Rbac), Outcome::Refused(By::Rbac), with, without]
}

/// Outcomes of a request that policies do not affect, by the namespaces of the guests.
pub(super) const fn by_namespace(own: Outcome, shared: Outcome) -> Expected {
    [own, own, shared, shared]
}

impl Setting {
    /// The outcome in this setting.
    pub(super) fn of(self, expected: Expected) -> Outcome {
        let index = SETTINGS.iter().position(|one| *one == self);
        expected[index.unwrap_or_default()]
    }
}

impl Attempt<Act> {
    /// Makes the attempt, and compares what came of it with what is expected.
    pub(super) async fn make(&self, site: &Site) -> Result<()> {
        let expected = site.setting.of(self.expected);
        let (seen, sent) = match self.act {
            Act::Request(of) => {
                let request = of(site);
                (request.make(site, expected.is_permission()).await?, format!("{request:?}"))
            }
            Act::Steps(of) => (of(site).await?, String::new()),
        };
        expected.check(&seen)?;
        site.learns_nothing(&seen, &sent)
    }
}

impl Outcome {
    fn is_permission(self) -> bool {
        !matches!(self, Self::Refused(_))
    }

    /// Compares what came of an attempt with this outcome.
    pub(super) fn check(self, seen: &Seen) -> Result<()> {
        let is_expected = match (self, seen) {
            (Self::Refused(by), Seen::Refused(found, _)) => by == *found,
            (Self::Bounded(_) | Self::NotPrevented(_), Seen::Permitted) => true,
            _ => false,
        };
        ensure!(is_expected, "expected {self}, but {seen}");
        Ok(())
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rbac => "RBAC",
            Self::Policy => "policy",
            Self::ApiServer => "API server",
            Self::Kubernetes => "Kubernetes",
            Self::VmOperator => "VM Operator",
            Self::MgmtCsi => "mgmt-csi",
            Self::GcCsi => "gc-csi",
            Self::GcCsiNode => "gc-csi-node",
            Self::GrpcServer => "gRPC server",
            Self::Tls => "TLS",
            Self::StorageInfra => "storage infra",
            Self::Network => "network",
            Self::Hypervisor => "hypervisor",
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(by) => write!(f, "{by}"),
            Self::Bounded(_) => f.write_str("bounded"),
            Self::NotPrevented(_) => f.write_str("**not prevented**"),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(by, message) => write!(f, "it was refused by {by}: {message}"),
            Self::Permitted => f.write_str("it was permitted"),
        }
    }
}
