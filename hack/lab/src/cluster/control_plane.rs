//! Kubernetes control plane: etcd, kube-apiserver, kube-controller-manager and, in guests, kube-scheduler.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::kubeconfig::{self, User};
use crate::pki::{self, Authority};
use crate::ports;
use crate::ready::{Ready, Tls};
use crate::run::Run;
use crate::state::{Cluster, Component};

/// The address at which VMs reach the ports of the host's loopback that are forwarded to their network.
pub const SERVER_ADDRESS_FROM_VM: &str = "10.0.2.2";
/// First address of the service range: the `kubernetes` Service.
const KUBERNETES_SERVICE: &str = "10.96.0.1";
/// The API server's user at other API servers.
const FRONT_PROXY: &str = "front-proxy-client";
const SERVICE_RANGE: &str = "10.96.0.0/16";

/// Parameters of a control plane.
pub struct ControlPlanePlan<'a> {
    /// `mgmt`, or the guest's name.
    pub name: &'a str,
    /// Whether it runs kube-scheduler: guests run pods.
    pub scheduler: bool,
    /// Whether other API servers answer for some of its groups, as KubeVirt's does.
    pub aggregates: bool,
}

/// A control plane that is configured and can be started.
pub struct ControlPlane {
    /// Its record in the state file.
    pub cluster: Cluster,
    authority: Authority,
    dir: PathBuf,
    etcd: u16,
    etcd_peer: u16,
    api: u16,
    controllers: u16,
    scheduler: Option<u16>,
    aggregates: bool,
}

impl ControlPlane {
    /// Allocates ports, signs certificates and writes kubeconfigs. Starts no process.
    pub fn plan(run: &Run, plan: &ControlPlanePlan<'_>) -> Result<Self> {
        let dir = run.path("clusters").join(plan.name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let free = ports::free(5)?;
        let authority = Authority::new(&authority_name(plan.name))?;
        let ca = dir.join("ca.crt");
        pki::write_private(&ca, &authority.cert())?;
        let cluster = Cluster {
            name: plan.name.to_owned(),
            server: format!("https://127.0.0.1:{}", free[2]),
            kubeconfig: dir.join("admin.kubeconfig"),
            ca,
            audit_log: run.path("logs").join(format!("{}-audit.jsonl", plan.name)),
        };
        let this = Self {
            cluster,
            authority,
            dir,
            etcd: free[0],
            etcd_peer: free[1],
            api: free[2],
            controllers: free[3],
            scheduler: plan.scheduler.then_some(free[4]),
            aggregates: plan.aggregates,
        };
        this.write_files()?;
        Ok(this)
    }

    fn write_files(&self) -> Result<()> {
        let local = ["127.0.0.1", "localhost"];
        let api = [
            "127.0.0.1",
            "localhost",
            SERVER_ADDRESS_FROM_VM,
            KUBERNETES_SERVICE,
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
        ];
        self.authority.server("kube-apiserver", &api)?.write(&self.dir, "apiserver")?;
        self.authority.server("kube-controller-manager", &local)?.write(&self.dir, "controller-manager")?;
        self.authority.server("kube-scheduler", &local)?.write(&self.dir, "scheduler")?;
        self.authority
            .client("kube-apiserver-kubelet-client", Some("system:masters"))?
            .write(&self.dir, "kubelet-client")?;
        // Of its own: a certificate of the cluster's authority, such as that of a kubelet, gives no access to etcd.
        let etcd = Authority::new(&format!("{} etcd", self.cluster.name))?;
        pki::write_private(&self.dir.join("etcd-ca.crt"), &etcd.cert())?;
        etcd.peer("etcd", &local)?.write(&self.dir, "etcd-server")?;
        etcd.client("kube-apiserver", None)?.write(&self.dir, "etcd-client")?;
        if self.aggregates {
            let front = Authority::new(&format!("{} front proxy", self.cluster.name))?;
            pki::write_private(&self.dir.join("front-proxy-ca.crt"), &front.cert())?;
            front.client(FRONT_PROXY, None)?.write(&self.dir, "front-proxy")?;
        }
        let (private, public) = pki::token_key()?;
        pki::write_private(&self.dir.join("tokens.key"), &private)?;
        pki::write_private(&self.dir.join("tokens.pub"), &public)?;
        self.certificate_kubeconfig("admin", Some("system:masters"), &self.cluster.kubeconfig)?;
        for user in ["kube-controller-manager", "kube-scheduler"] {
            let path = self.dir.join(format!("{user}.kubeconfig"));
            self.certificate_kubeconfig(&format!("system:{user}"), None, &path)?;
        }
        Ok(())
    }

    fn certificate_kubeconfig(&self, user: &str, group: Option<&str>, path: &Path) -> Result<()> {
        let pair = self.authority.client(user, group)?;
        kubeconfig::write(path, &self.cluster.server, &self.authority.cert(), &User::Certificate(&pair))
    }

    /// Files that a VM needs to become the node `name`: a kubeconfig and the kubelet's certificate.
    pub fn kubelet_files(&self, name: &str) -> Result<KubeletFiles> {
        KubeletFiles::sign(&self.authority, &server_from_vm(self.api), name)
    }

    /// Files that this host needs to become the node `name`.
    pub fn kubelet_files_of_host(&self, name: &str) -> Result<KubeletFiles> {
        KubeletFiles::sign(&self.authority, &self.cluster.server, name)
    }

    /// Keeps the key of the cluster's authority beside its certificate, for nodes that join later.
    pub fn keep_key(&self) -> Result<()> {
        self.authority.pair().write(&self.dir, "ca").map(drop)
    }

    /// The port of its API server.
    pub fn api_port(&self) -> u16 {
        self.api
    }

    /// Starts all processes and returns when the API server is ready.
    pub async fn start(&self, run: &Run, tools: &Path) -> Result<()> {
        let name = &self.cluster.name;
        run.launch(&format!("{name}-etcd"), self.etcd_component(tools)).await?;
        run.launch(&format!("{name}-apiserver"), self.apiserver_component(tools)?).await?;
        let controllers = self.controller_manager_component(tools);
        let controllers = async { run.launch(&format!("{name}-controller-manager"), controllers).await };
        let scheduler = async {
            match self.scheduler {
                Some(port) => {
                    run.launch(&format!("{name}-scheduler"), self.scheduler_component(tools, port)).await
                }
                None => Ok(()),
            }
        };
        futures::try_join!(controllers, scheduler).map(drop)
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn etcd_component(&self, tools: &Path) -> Component {
        let client = format!("https://127.0.0.1:{}", self.etcd);
        let peer = format!("https://127.0.0.1:{}", self.etcd_peer);
        let (ca, cert, key) =
            (self.file("etcd-ca.crt"), self.file("etcd-server.crt"), self.file("etcd-server.key"));
        let client_files = Tls {
            ca: self.dir.join("etcd-ca.crt"),
            client: Some(["etcd-client.crt", "etcd-client.key"].map(|name| self.dir.join(name))),
        };
        Component {
            argv: argv(
                tools,
                "server",
                &[
                    ("name", self.cluster.name.clone()),
                    ("data-dir", self.file("etcd")),
                    ("listen-client-urls", client.clone()),
                    ("advertise-client-urls", client),
                    ("listen-peer-urls", peer.clone()),
                    ("initial-advertise-peer-urls", peer.clone()),
                    ("initial-cluster", format!("{}={peer}", self.cluster.name)),
                    ("client-cert-auth", "true".into()),
                    ("trusted-ca-file", ca.clone()),
                    ("cert-file", cert.clone()),
                    ("key-file", key.clone()),
                    ("peer-client-cert-auth", "true".into()),
                    ("peer-trusted-ca-file", ca),
                    ("peer-cert-file", cert),
                    ("peer-key-file", key),
                    // The data of a lab need not survive a crash of the host, only of the process.
                    ("unsafe-no-fsync", "true".into()),
                    // As kubeadm sets it: idle watches receive bookmarks.
                    ("watch-progress-notify-interval", "5s".into()),
                    ("log-level", "warn".into()),
                ],
            ),
            env: Default::default(),
            ready: Ready::tls(self.etcd, "/health", client_files),
            http: None,
            grace: 5,
            driver: None,
        }
    }

    fn apiserver_component(&self, tools: &Path) -> Result<Component> {
        let mut flags = vec![
            ("etcd-servers", format!("https://127.0.0.1:{}", self.etcd)),
            ("etcd-cafile", self.file("etcd-ca.crt")),
            ("etcd-certfile", self.file("etcd-client.crt")),
            ("etcd-keyfile", self.file("etcd-client.key")),
            ("bind-address", "127.0.0.1".into()),
            ("secure-port", self.api.to_string()),
            // The address in the `kubernetes` endpoints. It must not be loopback; pods in VMs reach us there.
            ("advertise-address", SERVER_ADDRESS_FROM_VM.into()),
            ("tls-cert-file", self.file("apiserver.crt")),
            ("tls-private-key-file", self.file("apiserver.key")),
            ("client-ca-file", self.file("ca.crt")),
            ("kubelet-preferred-address-types", "InternalIP".into()),
            ("kubelet-certificate-authority", self.file("ca.crt")),
            ("kubelet-client-certificate", self.file("kubelet-client.crt")),
            ("kubelet-client-key", self.file("kubelet-client.key")),
            ("service-account-issuer", "https://kubernetes.default.svc".into()),
            ("service-account-key-file", self.file("tokens.pub")),
            ("service-account-signing-key-file", self.file("tokens.key")),
            ("service-cluster-ip-range", SERVICE_RANGE.into()),
            ("authorization-mode", "Node,RBAC".into()),
            ("enable-admission-plugins", "NodeRestriction".into()),
            ("allow-privileged", "true".into()),
            ("max-requests-inflight", "2000".into()),
            ("max-mutating-requests-inflight", "1000".into()),
        ];
        if self.aggregates {
            flags.extend(self.aggregation_flags());
        }
        let policy = self.dir.join("audit-policy.yaml");
        fs::write(&policy, include_str!("../../manifests/audit-policy.yaml"))
            .with_context(|| format!("cannot write {}", policy.display()))?;
        flags.extend([
            ("audit-policy-file", policy.display().to_string()),
            ("audit-log-path", self.cluster.audit_log.display().to_string()),
            ("audit-log-format", "json".into()),
            // An entry is on disk before its response is sent, so that tests can count exactly.
            ("audit-log-mode", "blocking".into()),
            ("audit-log-maxsize", "4096".into()),
        ]);
        Ok(Component {
            argv: argv(tools, "kube-apiserver", &flags),
            env: Default::default(),
            ready: Ready::https(self.api, "/readyz", &self.cluster.ca),
            http: None,
            grace: 10,
            driver: None,
        })
    }

    /// Other API servers learn from the extra headers who the user is, and trust them with the client certificate.
    fn aggregation_flags(&self) -> [(&'static str, String); 7] {
        [
            ("requestheader-client-ca-file", self.file("front-proxy-ca.crt")),
            ("requestheader-allowed-names", FRONT_PROXY.into()),
            ("requestheader-username-headers", "X-Remote-User".into()),
            ("requestheader-group-headers", "X-Remote-Group".into()),
            ("requestheader-extra-headers-prefix", "X-Remote-Extra-".into()),
            ("proxy-client-cert-file", self.file("front-proxy.crt")),
            ("proxy-client-key-file", self.file("front-proxy.key")),
        ]
    }

    fn controller_manager_component(&self, tools: &Path) -> Component {
        let kubeconfig = self.file("kube-controller-manager.kubeconfig");
        Component {
            argv: argv(
                tools,
                "kube-controller-manager",
                &[
                    ("kubeconfig", kubeconfig.clone()),
                    ("authentication-kubeconfig", kubeconfig.clone()),
                    ("authorization-kubeconfig", kubeconfig),
                    ("bind-address", "127.0.0.1".into()),
                    ("secure-port", self.controllers.to_string()),
                    ("tls-cert-file", self.file("controller-manager.crt")),
                    ("tls-private-key-file", self.file("controller-manager.key")),
                    ("service-account-private-key-file", self.file("tokens.key")),
                    ("root-ca-file", self.file("ca.crt")),
                    ("use-service-account-credentials", "true".into()),
                    ("leader-elect", "false".into()),
                    ("kube-api-qps", "500".into()),
                    ("kube-api-burst", "1000".into()),
                ],
            ),
            env: Default::default(),
            ready: Ready::https(self.controllers, "/healthz", &self.cluster.ca),
            http: None,
            grace: 3,
            driver: None,
        }
    }

    fn scheduler_component(&self, tools: &Path, port: u16) -> Component {
        let kubeconfig = self.file("kube-scheduler.kubeconfig");
        Component {
            argv: argv(
                tools,
                "kube-scheduler",
                &[
                    ("kubeconfig", kubeconfig.clone()),
                    ("authentication-kubeconfig", kubeconfig.clone()),
                    ("authorization-kubeconfig", kubeconfig),
                    ("bind-address", "127.0.0.1".into()),
                    ("secure-port", port.to_string()),
                    ("tls-cert-file", self.file("scheduler.crt")),
                    ("tls-private-key-file", self.file("scheduler.key")),
                    ("leader-elect", "false".into()),
                    ("kube-api-qps", "500".into()),
                    ("kube-api-burst", "1000".into()),
                ],
            ),
            env: Default::default(),
            ready: Ready::https(port, "/healthz", &self.cluster.ca),
            http: None,
            grace: 3,
            driver: None,
        }
    }
}

/// Credentials that make a VM a node.
pub struct KubeletFiles {
    /// Kubeconfig of the user `system:node:NAME`.
    pub kubeconfig: String,
    /// The kubelet's serving certificate.
    pub serving: pki::Pair,
    /// The client certificate that the lab presents to the kubelet.
    pub client: pki::Pair,
    /// The certificate of the cluster's authority.
    pub ca: String,
}

impl KubeletFiles {
    /// Files of a node that joins a cluster that runs and whose authority's key [was kept](ControlPlane::keep_key).
    pub fn of_running(cluster: &Cluster, name: &str) -> Result<Self> {
        let dir = cluster.ca.parent().context("the authority's certificate is in no folder")?;
        let authority = Authority::read(&authority_name(&cluster.name), dir, "ca")?;
        Self::sign(&authority, &server_from_vm(ports::of_url(&cluster.server)?), name)
    }

    fn sign(authority: &Authority, server: &str, name: &str) -> Result<Self> {
        let client = authority.client(&format!("system:node:{name}"), Some("system:nodes"))?;
        Ok(Self {
            kubeconfig: kubeconfig::render(server, &authority.cert(), &User::Certificate(&client))?,
            serving: authority.server(&format!("system:node:{name}"), &["127.0.0.1", name])?,
            client: authority.client("lab", Some("system:masters"))?,
            ca: authority.cert(),
        })
    }
}

fn server_from_vm(port: u16) -> String {
    format!("https://{SERVER_ADDRESS_FROM_VM}:{port}")
}

fn authority_name(cluster: &str) -> String {
    format!("{cluster} cluster")
}

/// `PROGRAM --flag=value ...`
pub fn argv(folder: &Path, program: &str, flags: &[(&str, String)]) -> Vec<String> {
    let mut words = vec![folder.join(program).display().to_string()];
    words.extend(flags.iter().map(|(flag, value)| format!("--{flag}={value}")));
    words
}
