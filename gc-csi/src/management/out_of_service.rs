//! Out-of-service annotation of VMs whose guest Node has the out-of-service taint.

use crds::VirtualMachine;
use crds::names::ANNOTATION_OUT_OF_SERVICE;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::{ApiError, Management};

impl Management {
    /// Sets the annotation to the UID of the Node, or removes it. Succeeds if the VM does not exist.
    pub(crate) async fn set_out_of_service(
        &self,
        vm: &VirtualMachine,
        node: Option<&str>,
    ) -> Result<(), ApiError> {
        // With the UID, the API server refuses the patch if the VM was replaced by one of the same name.
        let metadata = json!({"uid": vm.metadata.uid, "annotations": {ANNOTATION_OUT_OF_SERVICE: node}});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let written = self.vms_api.patch(&vm.name_any(), &PatchParams::default(), &patch).await;
        match written.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
