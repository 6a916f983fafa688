//! Lost Nodes: taints a Node that is not ready as out of service if its VM is proven off or gone, and takes that taint back when
//! the VM runs again. Kubernetes then moves the Node's pods without a person. Taints that people set are left alone; see [`super::out_of_service`].

mod decide;
mod proofs;
mod taint;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crds::names::VmName;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use kube_kit::client::chain;
use kube_kit::events::Events;
use kube_kit::partial::Node;
use kube_kit::queue::NextAction;

use super::metrics::{TaintChange, TaintMetrics};
use super::zones::Zones;
use crate::events::Event;
use crate::guest::reference;
use crate::management::VirtualMachines;
use crate::vm_volumes::{Vm, VmApi};
use decide::{Decision, Facts, Obstacle, Proof, decide, needs_proof};

pub(crate) use decide::TaintPolicy;
pub(super) use proofs::Proofs;

/// How often KubeVirt's objects of a VM are read while its Node is not ready: pods virt-launcher are not watched.
const KUBEVIRT_INTERVAL: Duration = Duration::from_secs(5);

/// Taints lost Nodes.
pub(super) struct LostNodes {
    policy: TaintPolicy,
    api: Api<Node>,
    /// The cache of Nodes.
    zones: Arc<Zones>,
    vms: VirtualMachines,
    proofs: Proofs,
    events: Events,
    metrics: TaintMetrics,
    /// What was last reported about Nodes that are not ready.
    reported: Mutex<HashMap<VmName, Obstacle>>,
}

impl LostNodes {
    pub(super) fn new(
        policy: TaintPolicy,
        client: &Client,
        zones: Arc<Zones>,
        vms: VirtualMachines,
        proofs: Proofs,
        events: Events,
        metrics: TaintMetrics,
    ) -> Self {
        let (api, reported) = (Api::all(client.clone()), Mutex::default());
        Self { policy, api, zones, vms, proofs, events, metrics, reported }
    }

    /// Forgets what was reported: another leader may have reported since.
    pub(super) fn forget(&self) {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Taints one Node, takes the taint back, or reports why neither is done.
    pub(super) async fn reconcile(&self, name: &VmName) -> Result<NextAction, String> {
        let Some(node) = self.zones.node(name) else {
            self.is_new(name, None);
            return Ok(NextAction::AwaitChange);
        };
        let vm = self.vms.get(name);
        let (proof, ends) = self.proof(name, &node, vm.as_deref()).await?;
        let decision = self.decide(&node, vm.as_deref(), proof);
        let obstacle = match decision {
            Decision::Report(obstacle) => Some(obstacle),
            Decision::Nothing | Decision::Taint | Decision::Untaint => None,
        };
        match (decision, self.is_new(name, obstacle)) {
            (Decision::Report(obstacle), true) => self.report(name, &node, obstacle),
            (Decision::Nothing | Decision::Report(_), _) => {}
            (Decision::Taint | Decision::Untaint, _) => return self.change(name, decision).await,
        }
        // A proof begins or ends without a change of an object that is watched.
        Ok(ends.map_or(NextAction::AwaitChange, NextAction::RequeueAfter))
    }

    /// The proof that a VM is off, and when it may be another one without a change.
    async fn proof(
        &self,
        name: &VmName,
        node: &Node,
        vm: Option<&Vm>,
    ) -> Result<(Proof, Option<Duration>), String> {
        let Some(vm) = vm else { return Ok((Proof::None, None)) };
        match self.vms.vm_api() {
            VmApi::VmOperator => Ok(self.proofs.of(name, vm)),
            VmApi::KubeVirt if !needs_proof(self.policy, node) => Ok((Proof::None, None)),
            VmApi::KubeVirt => {
                let unread = |error| format!("failed to read whether VM {name} runs: {error}");
                let is_off = self.vms.is_off(name).await.map_err(unread)?;
                let proof = if is_off { Proof::Fresh } else { Proof::None };
                Ok((proof, Some(KUBEVIRT_INTERVAL)))
            }
        }
    }

    fn decide(&self, node: &Node, vm: Option<&Vm>, proof: Proof) -> Decision {
        decide(&Facts {
            policy: self.policy,
            node,
            vm,
            is_other_guests: vm.is_some_and(|vm| self.vms.is_other_guests(vm)),
            vm_api: self.vms.vm_api(),
            proof,
        })
    }

    /// Changes the taint, if the decision is the same by the Node that the API server returns now.
    async fn change(&self, name: &VmName, decided: Decision) -> Result<NextAction, String> {
        let fail = |error: &kube::Error| {
            format!("failed to change the taints of guest Node {name}: {}", chain(error))
        };
        let Some(node) = self.api.get_opt(name).await.map_err(|error| fail(&error))? else {
            return Ok(NextAction::AwaitChange);
        };
        let vm = self.vms.get(name);
        let (proof, _) = self.proof(name, &node, vm.as_deref()).await?;
        if self.decide(&node, vm.as_deref(), proof) != decided {
            return Ok(NextAction::RequeueAfter(taint::RETRY));
        }
        let change = if decided == Decision::Taint { TaintChange::Added } else { TaintChange::Removed };
        let patch = Patch::Json::<()>(taint::patch(&node, change));
        match self.api.patch(name, &PatchParams::default(), &patch).await {
            Ok(_) => {
                self.report_change(name, &node, change);
                Ok(NextAction::AwaitChange)
            }
            // The Node has changed since it was read, or is gone.
            Err(kube::Error::Api(status)) if [404, 409, 422].contains(&status.code) => {
                Ok(NextAction::RequeueAfter(taint::RETRY))
            }
            Err(error) => Err(fail(&error)),
        }
    }

    fn report_change(&self, name: &VmName, node: &Node, change: TaintChange) {
        self.metrics.count(change);
        let vm = self.vms.full_name(name);
        let prover = match self.vms.vm_api() {
            VmApi::VmOperator => "the storage infra",
            VmApi::KubeVirt => "KubeVirt",
        };
        let (event, note) = match change {
            TaintChange::Added => (
                Event::OutOfServiceTaintAdded,
                format!(
                    "tainted the Node as out of service, because it is not ready and {prover} has proven that VirtualMachine \
                     {vm} is off: Kubernetes starts its pods on other Nodes"
                ),
            ),
            TaintChange::Removed => (
                Event::OutOfServiceTaintRemoved,
                format!(
                    "removed the out-of-service taint that gc-csi had set: VirtualMachine {vm} runs again"
                ),
            ),
        };
        tracing::warn!(node = %name, "{note}");
        event.report(&self.events, reference(node), note);
    }

    fn report(&self, name: &VmName, node: &Node, obstacle: Obstacle) {
        let note = format!(
            "the Node is not ready, and gc-csi does not taint it as out of service: {obstacle}. If you know that its VM will not come \
             back, set the taint yourself"
        );
        tracing::info!(node = %name, vm = %self.vms.full_name(name), "{note}");
        Event::NodeNotProvenOff.report(&self.events, reference(node), note);
    }

    /// Remembers what is reported about a Node, if anything. Whether it differs from what was reported before.
    fn is_new(&self, name: &VmName, obstacle: Option<Obstacle>) -> bool {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match obstacle {
            Some(obstacle) => reported.insert(name.clone(), obstacle),
            None => reported.remove(name),
        };
        before != obstacle
    }
}
