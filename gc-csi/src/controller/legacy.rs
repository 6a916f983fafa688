//! Legacy driver name: serves existing volumes of an earlier driver under its name. New volumes are created under our
//! own name only.

use crds::names::{GUEST_DRIVER, PARAMETER_MANAGEMENT_CLASS};
use csi::identity::Identity;
use csi::metrics::CallMetrics;
use csi::proto::controller_server::ControllerServer;
use csi::proto::identity_server::IdentityServer;
use csi::server::{LegacyArgs, ServeError};
use csi::{Status, proto};
use k8s_openapi::api::storage::v1::StorageClass;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::service::Controller;

/// All driver names of our volumes.
pub(super) fn drivers(args: &LegacyArgs) -> Vec<String> {
    [GUEST_DRIVER.to_owned()].into_iter().chain(args.legacy_driver_name.clone()).collect()
}

/// Serves the legacy name until `stop`; returns at once if none is configured.
pub(super) async fn serve(
    args: &LegacyArgs,
    identity: impl FnOnce(&str) -> Identity,
    service: &Controller,
    calls: CallMetrics,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let Some((name, endpoint)) = args.get() else { return Ok(()) };
    let service = Controller { legacy: Some(name.to_owned()), ..service.clone() };
    let routes = Routes::new(IdentityServer::new(identity(name))).add_service(ControllerServer::new(service));
    csi::server::serve(endpoint, routes, calls, stop).await
}

impl Controller {
    /// Refuses CreateVolume under the legacy name.
    pub(super) fn refuse_as_legacy(&self, request: &proto::CreateVolumeRequest) -> Result<(), Status> {
        let Some(legacy) = &self.legacy else { return Ok(()) };
        let classes = self.guest.classes.list();
        let parameter_values: Vec<&str> = request.parameters.values().map(String::as_str).collect();
        Err(Status::invalid_argument(format!(
            "driver {legacy} creates no new volumes, {GUEST_DRIVER} only serves its existing ones; {}",
            class_advice(classes.iter().map(|class| &**class), &parameter_values)
        )))
    }
}

/// The StorageClass to use instead: one that names the same management class as any of the request's parameters, or
/// else all of ours.
fn class_advice<'a>(classes: impl Iterator<Item = &'a StorageClass>, parameter_values: &[&str]) -> String {
    let management_class = |class: &'a StorageClass| {
        class.parameters.as_ref()?.get(PARAMETER_MANAGEMENT_CLASS).map(String::as_str)
    };
    let mut ours: Vec<(&str, Option<&str>)> = classes
        .filter(|class| class.provisioner == GUEST_DRIVER)
        .filter_map(|class| Some((class.metadata.name.as_deref()?, management_class(class))))
        .collect();
    ours.sort_unstable();
    let same = ours.iter().filter(|(_, leads_to)| leads_to.is_some_and(|to| parameter_values.contains(&to)));
    let mut names: Vec<&str> = same.map(|(name, _)| *name).collect();
    if names.is_empty() {
        names = ours.iter().map(|(name, _)| *name).collect();
    }
    match names.as_slice() {
        [] => format!("create a StorageClass with provisioner {GUEST_DRIVER} and use it instead"),
        names => format!("use StorageClass {} instead", names.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, provisioner: &str, management_class: &str) -> StorageClass {
        serde_json::from_value(json!({
            "metadata": {"name": name},
            "provisioner": provisioner,
            "parameters": {PARAMETER_MANAGEMENT_CLASS: management_class},
        }))
        .unwrap()
    }

    #[test]
    fn the_advice_names_the_class_with_the_same_management_class_or_all_of_ours() {
        let classes = [
            class("slow", GUEST_DRIVER, "hdd"),
            class("fast", GUEST_DRIVER, "ssd"),
            class("old-fast", "legacy.example", "ssd"),
        ];
        assert_eq!(class_advice(classes.iter(), &["ssd", "ext4"]), "use StorageClass fast instead");
        assert_eq!(class_advice(classes.iter(), &["nvme"]), "use StorageClass fast or slow instead");
        assert_eq!(
            class_advice(classes[2..].iter(), &["ssd"]),
            "create a StorageClass with provisioner guest.csi.nestor.dev and use it instead"
        );
    }
}
