//! Pods of a chart on this host, where no image can be pulled: the program of each container runs with the arguments,
//! environment, account, volumes, user and read-only root of its pod, in its own mount namespace.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use lab::Lab;
use lab::cluster::objects;
use serde_json::Value;
use tempfile::TempDir;

use crate::chart::{containers, program, texts};
use crate::program::Running;
use crate::{PATIENCE, eventually};

/// Mount point of the ServiceAccount in a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Builds a root from this host's programs, bind-mounts pairs of folders up to `--`, and executes the rest.
const ENTER: &str = r#"
root=$1 user=$2 program=$3; shift 3
mount -t tmpfs tmpfs "$root"
for name in bin sbin lib lib64; do cp --no-dereference "/$name" "$root/$name"; done
mkdir "$root/usr" "$root/proc" "$root/sys" "$root/dev" "$root/run" "$root/var"
ln -s /run "$root/var/run"
for name in usr proc sys dev; do mount --rbind "/$name" "$root/$name"; done
touch "$root/program"
mount --bind "$program" "$root/program"
while [ "$1" != -- ]; do
  mkdir -p "$root$2"
  mount --bind "$1" "$root$2"
  shift 2
done
shift
mount -o remount,ro "$root"
exec chroot --userspec="$user" "$root" /program "$@"
"#;

/// Running containers of a pod.
pub struct LocalPod {
    containers: Vec<(Value, Running)>,
    _folder: TempDir,
}

/// The context that the containers of a pod share.
struct PodContext<'a> {
    lab: &'a Lab,
    spec: &'a Value,
    folder: &'a Path,
    namespace: &'a str,
    /// Name of the pod.
    name: String,
    /// Port of the API server on this host.
    api_port: u16,
    volumes: BTreeMap<String, PathBuf>,
}

impl LocalPod {
    /// Starts the containers of a Deployment's or DaemonSet's pod in order. A Deployment must have been applied: its pod
    /// exists and is pending.
    pub async fn start(lab: &Lab, client: &Client, namespace: &str, owner: &Value) -> Result<Self> {
        let spec = &owner["spec"]["template"]["spec"];
        let folder = tempfile::tempdir()?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let name = match owner["kind"] == "Deployment" {
            true => pod_of(client, namespace, owner).await?,
            false => "node".to_owned(),
        };
        let cluster = cluster_of(lab, client, namespace).await?;
        let volumes = volumes(client, namespace, spec, folder.path()).await?;
        let mut context =
            PodContext { lab, spec, folder: folder.path(), namespace, name, api_port: cluster.1, volumes };
        let account = account(client, &context, &cluster.0).await?;
        context.volumes.insert(ACCOUNT.to_owned(), account);
        let mut running = Vec::new();
        for container in containers(spec) {
            let process = context.run(container).await.with_context(|| format!("{}", container["name"]))?;
            running.push((container.clone(), process));
        }
        Ok(Self { containers: running, _folder: folder })
    }

    /// Waits until all probes of all containers pass.
    pub async fn ready(&self) -> Result<()> {
        for (container, process) in &self.containers {
            for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                let Some(path) = container[probe]["httpGet"]["path"].as_str() else { continue };
                // There is no kubelet that registers the node plugin.
                if path == "/readyz" && container["name"] == "gc-csi-node" {
                    continue;
                }
                eventually(&format!("{probe} of {} passes", container["name"]), PATIENCE, || async {
                    Ok(match process.get(path).await {
                        Ok((200, _)) => Ok(()),
                        other => Err(format!("{other:?}; log: {}", process.log())),
                    })
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Requests that API servers forbade, from the containers' logs.
    pub fn refused(&self) -> Vec<String> {
        let logs = self.containers.iter().map(|(container, process)| (&container["name"], process.log()));
        let lines = logs.flat_map(|(name, log)| {
            let lines: Vec<String> = log.lines().map(|line| format!("{name}: {line}")).collect();
            lines
        });
        lines.filter(|line| line.to_lowercase().contains("forbidden")).collect()
    }

    /// Stops the containers in reverse order.
    pub async fn stop(self) -> Result<()> {
        for (container, process) in self.containers.into_iter().rev() {
            let status = process.stop().await.with_context(|| format!("{}", container["name"]))?;
            let is_ours = container["restartPolicy"] == "Always" || container["name"] == container["image"];
            ensure!(!is_ours || status.success(), "{} exited with {status}", container["name"]);
        }
        Ok(())
    }
}

impl PodContext<'_> {
    async fn run(&self, container: &Value) -> Result<Running> {
        let root = self.folder.join("roots").join(container["name"].as_str().context("no name")?);
        fs::create_dir_all(&root)?;
        let program = program(self.lab, container)?;
        let mut words: Vec<String> =
            ["--mount", "--propagation", "private", "--", "env", "--ignore-environment"]
                .map(str::to_owned)
                .into();
        words.push("PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned());
        words.push("KUBERNETES_SERVICE_HOST=127.0.0.1".to_owned());
        words.push(format!("KUBERNETES_SERVICE_PORT={}", self.api_port));
        words.extend(self.environment(container).map(|(name, value)| format!("{name}={value}")));
        words.extend(["sh", "-ec", ENTER, "sh"].map(str::to_owned));
        words.extend([root.display().to_string(), self.user(container), program.display().to_string()]);
        words.extend(self.mounts(container)?);
        words.push("--".to_owned());
        let is_http =
            |word: &String| word.starts_with("--http-listen=") || word.starts_with("--http-endpoint=");
        let arguments = texts(&container["args"]);
        let flag = arguments.iter().find(|word| is_http(word)).context("it has no HTTP flag")?;
        let flag = flag.split('=').next().unwrap_or_default().to_owned();
        let here = arguments.iter().filter(|word| !is_http(word));
        words.extend(here.map(|word| word.replace("$(NAMESPACE)", self.namespace)));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Running::listening(Path::new("unshare"), &words, &flag, None).await
    }

    fn environment<'a>(&'a self, container: &'a Value) -> impl Iterator<Item = (&'a str, &'a str)> {
        container["env"].as_array().into_iter().flatten().filter_map(|one| {
            let value = match one["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("metadata.namespace") => self.namespace,
                Some("metadata.name") => &self.name,
                Some("spec.nodeName") => "node",
                _ => one["value"].as_str()?,
            };
            Some((one["name"].as_str()?, value))
        })
    }

    fn user(&self, container: &Value) -> String {
        let own = container["securityContext"]["runAsUser"].as_i64();
        let user = own.or_else(|| self.spec["securityContext"]["runAsUser"].as_i64()).unwrap_or_default();
        format!("{user}:{user}")
    }

    fn mounts(&self, container: &Value) -> Result<Vec<String>> {
        let mut pairs =
            vec![self.volumes[ACCOUNT].display().to_string(), ACCOUNT.replace("/var/run", "/run")];
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let name = mount["name"].as_str().unwrap_or_default();
            let volume = self.volumes.get(name).with_context(|| format!("no volume {name}"))?;
            let from = volume.join(mount["subPath"].as_str().unwrap_or_default());
            let to = mount["mountPath"].as_str().context("no mountPath")?;
            // The host's own are mounted already, and the account is below /run.
            if ["/dev", "/run"].contains(&to) {
                continue;
            }
            fs::create_dir_all(&from)?;
            pairs.extend([from.display().to_string(), to.to_owned()]);
        }
        Ok(pairs)
    }
}

/// The pod of a Deployment.
async fn pod_of(client: &Client, namespace: &str, owner: &Value) -> Result<String> {
    let labels: BTreeMap<String, String> =
        serde_json::from_value(owner["spec"]["selector"]["matchLabels"].clone())?;
    let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    eventually(&format!("{} has a pod", crate::chart::kind_and_name(owner)), PATIENCE, || async {
        let list = pods.list(&ListParams::default().labels(&labels.join(","))).await?;
        Ok(list.iter().map(ResourceExt::name_any).next().ok_or_else(|| "no pod".to_owned()))
    })
    .await
}

/// CA certificate and port of the API server that has this namespace.
async fn cluster_of(lab: &Lab, client: &Client, namespace: &str) -> Result<(String, u16)> {
    use k8s_openapi::api::core::v1::Namespace;
    let uid = |client: Client| async move {
        let namespaces: Api<Namespace> = Api::all(client);
        anyhow::Ok(namespaces.get_opt(namespace).await?.and_then(|found| found.uid()))
    };
    let expected = uid(client.clone()).await?;
    let state = lab.state();
    let is_management = uid(lab.management().await?).await? == expected;
    let cluster = match is_management {
        true => state.management.as_ref().context("no management cluster")?,
        false => &state.guests.get(crate::scenario::GUEST).context("no guest")?.cluster,
    };
    let port = cluster.server.rsplit(':').next().unwrap_or_default().trim_end_matches('/');
    Ok((fs::read_to_string(&cluster.ca)?, port.parse()?))
}

async fn account(client: &Client, context: &PodContext<'_>, ca: &str) -> Result<PathBuf> {
    let name = context.spec["serviceAccountName"].as_str().context("no account")?;
    let token = objects::token(client, context.namespace, name).await?;
    let folder = context.folder.join("account");
    fs::create_dir(&folder)?;
    for (file, text) in [("token", token.as_str()), ("ca.crt", ca), ("namespace", context.namespace)] {
        fs::write(folder.join(file), text)?;
    }
    Ok(folder)
}

/// Creates the folder of each volume.
async fn volumes(
    client: &Client,
    namespace: &str,
    spec: &Value,
    folder: &Path,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut volumes = BTreeMap::new();
    let group = spec["securityContext"]["fsGroup"].as_u64().map(u32::try_from).transpose()?;
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        let name = volume["name"].as_str().context("a volume without a name")?;
        let own = folder.join(name);
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            volumes.insert(name.to_owned(), PathBuf::from(path));
            continue;
        }
        fs::create_dir(&own)?;
        chown(&own, None, group)?;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o2775))?;
        for (file, bytes) in files(client, namespace, volume).await.with_context(|| name.to_owned())? {
            let path = own.join(file);
            fs::write(&path, bytes)?;
            chown(&path, None, group)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o440))?;
        }
        volumes.insert(name.to_owned(), own);
    }
    Ok(volumes)
}

/// The initial files of a volume.
async fn files(client: &Client, namespace: &str, volume: &Value) -> Result<BTreeMap<String, Vec<u8>>> {
    if volume["emptyDir"].is_object() {
        return Ok(BTreeMap::new());
    }
    if let Some(name) = volume["secret"]["secretName"].as_str() {
        return secret(client, namespace, name, &volume["secret"]["items"]).await;
    }
    let mut all = BTreeMap::new();
    let sources = volume["projected"]["sources"].as_array().context("a volume of an unknown kind")?;
    for source in sources {
        let (of_secret, of_map) = (&source["secret"], &source["configMap"]);
        match (of_secret["name"].as_str(), of_map["name"].as_str()) {
            (Some(name), _) => all.extend(secret(client, namespace, name, &of_secret["items"]).await?),
            (_, Some(name)) => all.extend(config_map(client, namespace, name, &of_map["items"]).await?),
            _ => bail!("a source of an unknown kind: {source}"),
        }
    }
    Ok(all)
}

async fn config_map(
    client: &Client,
    namespace: &str,
    name: &str,
    items: &Value,
) -> Result<BTreeMap<String, Vec<u8>>> {
    let found = Api::<ConfigMap>::namespaced(client.clone(), namespace).get(name).await?;
    let data = found.data.into_iter().flatten().map(|(key, text)| (key, text.into_bytes()));
    select(data.collect(), items).with_context(|| format!("ConfigMap {name}"))
}

async fn secret(
    client: &Client,
    namespace: &str,
    name: &str,
    items: &Value,
) -> Result<BTreeMap<String, Vec<u8>>> {
    let found = Api::<Secret>::namespaced(client.clone(), namespace).get(name).await?;
    let data = found.data.into_iter().flatten().map(|(key, ByteString(bytes))| (key, bytes));
    select(data.collect(), items).with_context(|| format!("Secret {name}"))
}

/// The files of these items; all of them without items.
fn select(mut data: BTreeMap<String, Vec<u8>>, items: &Value) -> Result<BTreeMap<String, Vec<u8>>> {
    let Some(items) = items.as_array() else { return Ok(data) };
    let selected = items.iter().map(|item| {
        let (key, path) =
            (item["key"].as_str().unwrap_or_default(), item["path"].as_str().unwrap_or_default());
        let bytes = data.remove(key).with_context(|| format!("no key {key}"))?;
        Ok((path.to_owned(), bytes))
    });
    selected.collect()
}
