//! Taints that declare a Node out of service: those of operators, and gc-csi's own. Pure.

use crds::names::{TAINT_OUT_OF_SERVICE, TAINT_PROVEN_OFF};
use k8s_openapi::api::core::v1::Taint;

/// Whether a taint declares a Node out of service, with any value and effect, as in Kubernetes.
pub(super) fn is_out_of_service(taint: &Taint) -> bool {
    taint.key == TAINT_OUT_OF_SERVICE
}

/// Whether a taint is the one that gc-csi itself sets.
pub(super) fn is_own(taint: &Taint) -> bool {
    is_out_of_service(taint)
        && taint.effect == "NoExecute"
        && taint.value.as_deref() == Some(TAINT_PROVEN_OFF)
}
