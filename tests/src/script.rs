//! A pod that runs a shell script once: its manifest and its output.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::pods::{IMAGE, Volume};

/// A pod that runs one script once and returns its output.
#[derive(Debug, Clone)]
pub struct Script {
    name: String,
    node: String,
    command: Vec<String>,
    pod: Value,
    container: Value,
}

impl Script {
    /// A shell script, which stops at the first error.
    pub fn new(name: &str, node: &str, script: &str) -> Self {
        let script = format!("exec >/dev/termination-log 2>&1\nset -eu\n{script}");
        Self {
            name: name.to_owned(),
            node: node.to_owned(),
            command: vec!["sh".to_owned(), "-c".to_owned(), script],
            pod: json!({"volumes": []}),
            container: json!({"volumeMounts": [], "volumeDevices": []}),
        }
    }

    /// A shell script that runs as root in the VM's own namespaces.
    pub fn on_vm(name: &str, node: &str, script: &str) -> Self {
        let enter = "exec chroot /host nsenter --target 1 --mount -- sh -euc \"$0\"";
        let mut this = Self::new(name, node, enter);
        this.command.push(script.to_owned());
        this.pod["hostPID"] = json!(true);
        // A kubelet that was cut off may still see a taint that has been removed, and would refuse the pod.
        this.pod["tolerations"] = json!([{"operator": "Exists"}]);
        this.container["securityContext"] = json!({"privileged": true});
        this.add("volumes", json!({"name": "host", "hostPath": {"path": "/"}}));
        this.add("volumeMounts", json!({"name": "host", "mountPath": "/host"}));
        this
    }

    fn add(&mut self, list: &str, item: Value) {
        let side = if list == "volumes" { &mut self.pod } else { &mut self.container };
        if let Some(items) = side[list].as_array_mut() {
            items.push(item);
        }
    }

    fn volume(&mut self, claim: &str, read_only: bool) {
        let source = json!({"claimName": claim, "readOnly": read_only});
        self.add("volumes", json!({"name": claim, "persistentVolumeClaim": source}));
    }

    /// Mounts a volume.
    pub fn mount(self, volume: &Volume, path: &str) -> Self {
        self.mount_claim(&volume.claim, path)
    }

    /// Mounts the volume of a claim that need not be bound yet.
    pub fn mount_claim(mut self, claim: &str, path: &str) -> Self {
        self.volume(claim, false);
        self.add("volumeMounts", json!({"name": claim, "mountPath": path}));
        self
    }

    /// Mounts a volume read-only.
    pub fn mount_read_only(mut self, volume: &Volume, path: &str) -> Self {
        self.volume(&volume.claim, true);
        self.add("volumeMounts", json!({"name": volume.claim, "mountPath": path}));
        self
    }

    /// Mounts a folder of a volume that the pod already mounts.
    pub fn and_sub_path(mut self, volume: &Volume, sub_path: &str, path: &str) -> Self {
        self.add("volumeMounts", json!({"name": volume.claim, "mountPath": path, "subPath": sub_path}));
        self
    }

    /// Adds a volume as a block device.
    pub fn device(self, volume: &Volume, path: &str) -> Self {
        self.device_claim(&volume.claim, path)
    }

    /// Adds the volume of a claim as a block device.
    pub fn device_claim(mut self, claim: &str, path: &str) -> Self {
        self.volume(claim, false);
        self.add("volumeDevices", json!({"name": claim, "devicePath": path}));
        self
    }

    /// Runs with all rights in the pod's namespaces, of which the network is the VM's.
    pub fn privileged(mut self) -> Self {
        self.container["securityContext"] = json!({"privileged": true});
        self
    }

    /// Runs as this user, with this fsGroup.
    pub fn as_user(mut self, user: u32, fs_group: u32) -> Self {
        self.pod["securityContext"] = json!({"runAsUser": user, "runAsGroup": user, "fsGroup": fs_group});
        self
    }

    /// The pod's manifest.
    pub fn pod(self) -> Result<Pod> {
        let (mut spec, mut container) = (self.pod, self.container);
        container["name"] = json!("script");
        container["image"] = json!(IMAGE);
        container["imagePullPolicy"] = json!("Never");
        container["command"] = json!(self.command);
        spec["containers"] = json!([container]);
        spec["nodeSelector"] = json!({"kubernetes.io/hostname": self.node});
        spec["restartPolicy"] = json!("Never");
        // Creating a pod network takes most of a pod's start time in an emulated VM, and no script needs one.
        spec["hostNetwork"] = json!(true);
        spec["automountServiceAccountToken"] = json!(false);
        spec["enableServiceLinks"] = json!(false);
        let pod = json!({"metadata": {"name": self.name}, "spec": spec});
        serde_json::from_value(pod).with_context(|| format!("invalid manifest of pod {}", self.name))
    }
}

pub(crate) fn phase(pod: Option<&Pod>) -> Option<&str> {
    pod?.status.as_ref()?.phase.as_deref()
}

/// The termination message of the pod's container.
pub fn termination_message(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let ended = status.state.as_ref()?.terminated.as_ref()?;
    ended.message.as_ref().map(|message| message.trim().to_owned())
}
