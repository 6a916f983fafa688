//! Connections to the two clusters.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use kube_kit::client::chain;

use crate::config::{Access, Config};
use crate::error::Error;

/// Time limit for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// One of the two tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The guest cluster.
    Guest,
    /// The management cluster.
    Management,
}

impl Tier {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Management => "management",
        }
    }
}

/// A connected cluster.
#[derive(Clone)]
pub struct Cluster {
    /// Which one it is.
    pub tier: Tier,
    /// Its client.
    pub client: Client,
    /// Address of its API server.
    pub server: String,
    /// Namespace of the claims: the flag's, or that of the context.
    pub namespace: String,
    /// Credentials in the kubeconfig.
    pub credentials: AuthInfo,
}

/// The connected clusters.
pub struct Clusters {
    /// The guest cluster.
    pub guest: Option<Cluster>,
    /// The management cluster.
    pub management: Option<Cluster>,
    /// Cluster ID of the guest, if it is configured.
    pub cluster_id: Option<String>,
    /// Prefix of management claims.
    pub volume_prefix: String,
}

impl Clusters {
    /// Connects to the configured clusters.
    pub async fn connect(config: Config) -> Result<Self, Error> {
        // Fails only if a provider is already installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let connect = async |tier, access: Option<Access>| match access {
            Some(access) => Cluster::connect(tier, access).await.map(Some),
            None => Ok(None),
        };
        Ok(Self {
            guest: connect(Tier::Guest, config.guest).await?,
            management: connect(Tier::Management, config.management).await?,
            cluster_id: config.cluster_id,
            volume_prefix: config.volume_prefix,
        })
    }

    /// The guest cluster, which a command needs.
    pub fn guest_for(&self, command: &'static str) -> Result<&Cluster, Error> {
        self.guest.as_ref().ok_or(Error::NotConnected(command, "guest"))
    }

    /// The management cluster, which a command needs.
    pub fn management_for(&self, command: &'static str) -> Result<&Cluster, Error> {
        self.management.as_ref().ok_or(Error::NotConnected(command, "management"))
    }

    /// The connected clusters.
    pub fn each(&self) -> impl Iterator<Item = &Cluster> {
        [&self.guest, &self.management].into_iter().flatten()
    }
}

impl Cluster {
    async fn connect(tier: Tier, access: Access) -> Result<Self, Error> {
        let fail = |reason| Error::Kubeconfig { cluster: tier.name(), reason };
        let (config, namespace) = configure(access).await.map_err(|error| fail(chain(&error)))?;
        let credentials = config.auth_info.clone();
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let client = Client::try_from(config).map_err(|error| fail(chain(&error)))?;
        Ok(Self { tier, client, server, namespace, credentials })
    }

    /// Objects of its namespace.
    pub fn namespaced<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Claims of a namespace.
    pub fn claims_of(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Cluster-scoped objects, or those of all namespaces.
    pub fn all<K: kube::Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }
}

async fn configure(access: Access) -> Result<(kube::Config, String), kube::config::KubeconfigError> {
    let options = KubeConfigOptions { context: access.context, ..Default::default() };
    let file = match access.kubeconfig {
        Some(path) => Kubeconfig::read_from(path)?,
        None => Kubeconfig::read()?,
    };
    let mut config = kube::Config::from_custom_kubeconfig(file, &options).await?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    let agent = concat!("kubectl-nestor/", env!("CARGO_PKG_VERSION"));
    config.headers.push((http::header::USER_AGENT, http::HeaderValue::from_static(agent)));
    let namespace = access.namespace.unwrap_or_else(|| config.default_namespace.clone());
    Ok((config, namespace))
}
