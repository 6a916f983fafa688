//! Minor versions of Kubernetes that a lab can run.

use std::fmt;

/// A minor version of Kubernetes: of the API servers, controllers, schedulers, kubelets and kubectl. etcd, the sidecars
/// and containerd are the same for all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Kubernetes {
    /// Kubernetes 1.35.
    #[value(name = "1.35")]
    V1_35,
    /// Kubernetes 1.36, which is built with the other tools.
    #[default]
    #[value(name = "1.36")]
    V1_36,
    /// Kubernetes 1.37.
    #[value(name = "1.37")]
    V1_37,
}

impl Kubernetes {
    /// The versions for which more tools are built.
    pub(crate) const OTHERS: [Self; 2] = [Self::V1_35, Self::V1_37];

    /// The module folder under `hack/tools` with its programs, unless they are built with the other tools.
    pub(super) fn module(self) -> Option<&'static str> {
        match self {
            Self::V1_35 => Some("kubernetes-1.35"),
            Self::V1_36 => None,
            Self::V1_37 => Some("kubernetes-1.37"),
        }
    }
}

impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_35 => "1.35",
            Self::V1_36 => "1.36",
            Self::V1_37 => "1.37",
        })
    }
}
