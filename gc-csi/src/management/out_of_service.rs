//! What this guest says of its own VMs: that the node of one is lost.

use crds::VirtualMachine;
use crds::names::ANNOTATION_OUT_OF_SERVICE;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::{ApiError, Management};

impl Management {
    /// Says of a VM that its node, of this UID, is out of service, or takes that back. Fine when the VM is gone.
    pub(crate) async fn set_out_of_service(
        &self,
        vm: &VirtualMachine,
        node: Option<&str>,
    ) -> Result<(), ApiError> {
        // The UID makes the API server refuse this for another VM of the name.
        let metadata = json!({"uid": vm.metadata.uid, "annotations": {ANNOTATION_OUT_OF_SERVICE: node}});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let written = self.vms_api.patch(&vm.name_any(), &PatchParams::default(), &patch).await;
        match written.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
