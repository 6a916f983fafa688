//! The black-box tests by the lab that they need and by the time that they take.

/// The step that upgrades the lab whose Nestor runs in pods, which starts with an earlier version for it.
pub(super) const UPGRADE: &str = "upgrade";

/// Modules of the black-box tests that need a lab whose Nestor runs in pods, in this order: `upgrade` leaves this tree's
/// version in the lab.
pub(super) const DEPLOYED: [&str; 2] = [UPGRADE, "deployed"];

/// Module of the black-box tests that runs once for each further version of Kubernetes.
pub(super) const KUBERNETES: &str = "kubernetes_versions";

/// Module of the black-box tests that needs a lab whose VMs Cluster API makes.
pub(super) const CLUSTER_API: &str = "capi";

/// Module of the black-box tests that needs a lab whose VMs KubeVirt makes.
pub(super) const KUBEVIRT: &str = "kubevirt";

/// Module of the black-box tests that needs a lab with pools in a Ceph cluster.
pub(super) const RBD: &str = "rbd";

/// Module of the black-box tests that needs a lab with several storage-infra servers.
pub(super) const INFRA_HA: &str = "infra_ha";

/// Module of the black-box tests that needs a lab with several hosts.
pub(super) const HOSTS: &str = "hosts";

/// Black-box tests of other modules that run in a lab with either engine: they look at volumes only from the guest.
pub(super) const ON_BOTH_ENGINES: [&str; 5] = [
    "expand::filesystems_and_devices_are_expanded_in_running_pods_and_between_pods",
    "snapshot::a_snapshot_of_a_running_pods_volume_has_all_earlier_and_no_later_writes",
    "clone::an_xfs_volume_and_its_clone_are_mounted_on_one_vm",
    "modify::limits_apply_on_the_vm_and_change_while_a_pod_uses_the_volume",
    "health::filesystems_that_became_read_only_are_reported_on_the_pod",
];

/// Black-box tests of other modules that run in a lab with KubeVirt too.
pub(super) const ON_KUBEVIRT: [&str; 12] = [
    "node::data_on_ext4_survives_the_pod_and_a_move_to_another_vm",
    "node::data_on_xfs_survives_the_pod_and_a_move_to_another_vm",
    "node::a_pod_reads_what_another_pod_wrote_to_a_block_device",
    "node::two_pods_on_one_vm_share_a_volume",
    "node::a_disk_with_another_filesystem_is_never_formatted",
    "node::a_disk_with_unknown_data_is_never_formatted",
    "node::the_directory_below_a_mount_has_mode_0",
    "node::kubelet_reports_the_usage_of_a_volume",
    "expand::filesystems_and_devices_are_expanded_in_running_pods_and_between_pods",
    "expand::ten_claims_are_expanded_at_once",
    "snapshot::a_snapshot_of_a_running_pods_volume_has_all_earlier_and_no_later_writes",
    "clone::an_xfs_volume_and_its_clone_are_mounted_on_one_vm",
];

/// Modules that take long: they wait for many alerts, cross-compile, build a dashboard server or a collector of traces, boot
/// a host with systemd, pack images or a release twice, restore a cluster, load it with a thousand disks, or remove each
/// right.
pub(super) const LONG: [&str; 10] = [
    "alert_faults",
    "arm64",
    "dashboards",
    "etcd_restore",
    "fairness",
    "images",
    "otel",
    "package",
    "release",
    "right_removal",
];

/// Tests that take about a minute or longer, or need Prometheus, which takes long to build, and whose modules have shorter
/// ones that show the usual case.
pub(super) const LONG_TESTS: [&str; 34] = [
    "access_modes::pods_on_two_vms_read_one_prefilled_volume",
    "alerts::prometheus_scrapes_every_program_and_evaluates_every_rule_and_dashboard",
    "alerts::rules_pass_promtool_and_their_unit_tests",
    "clone::an_xfs_volume_and_its_clone_are_mounted_on_one_vm",
    "credentials::a_guests_token_is_renewed_without_a_restart_and_dies_by_a_rotation",
    "credentials::a_token_that_expired_during_a_long_stop_heals_by_a_rotation",
    "credentials::certificates_and_the_ca_are_replaced_under_load_without_a_restart_or_a_failed_call",
    "expand::filesystems_and_devices_are_expanded_in_running_pods_and_between_pods",
    "export::adopted_files_are_mounted_by_pods_and_nothing_is_formatted",
    "ha::a_rolling_restart_under_load_fails_no_call_and_repeats_no_operation",
    "health::filesystems_that_became_read_only_are_reported_on_the_pod",
    "modify::limits_apply_on_the_vm_and_change_while_a_pod_uses_the_volume",
    "node::a_disk_with_a_partition_table_is_never_formatted",
    "node::a_pod_with_a_read_only_volume_cannot_write",
    "node::a_vm_keeps_nothing_of_a_detached_volume",
    "node::a_volume_belongs_to_the_fs_group_of_the_pod",
    "node::data_on_btrfs_survives_the_pod_and_a_move_to_another_vm",
    "node::data_on_xfs_survives_the_pod_and_a_move_to_another_vm",
    "node::kubelet_reports_the_usage_of_a_volume",
    "node::mount_options_of_the_class_are_used",
    "node::sub_paths_of_a_volume_are_mounted_separately",
    "node::the_directory_below_a_mount_has_mode_0",
    "node::two_pods_on_one_vm_share_a_volume",
    "node_loss::a_pod_moves_from_a_hung_vm_only_after_that_is_powered_off",
    "node_loss::a_pod_moves_from_a_vm_without_network_which_loses_its_disk_while_it_runs",
    "node_loss::automatic::a_pod_of_a_killed_vm_runs_elsewhere_without_a_person",
    "node_loss::automatic::the_taint_of_a_person_stays_when_the_vm_is_proven_off_and_when_it_returns",
    "node_loss::automatic::with_the_policy_never_no_node_is_tainted",
    "partition::a_half_open_connection_to_the_infra_is_reported_on_every_tier_and_recovers",
    "partition::a_pod_is_not_affected_while_libvirtd_and_the_management_cluster_are_down",
    "proven_off::a_saved_vm_keeps_its_disk_and_a_disk_of_a_restored_vm_is_detached",
    "registration::a_driver_that_kubelet_refused_is_registered_later_without_a_restart",
    "rights::shared::a_shared_volume_is_mounted_without_set_user_id_programs_and_devices",
    "snapshot::a_snapshot_of_a_running_pods_volume_has_all_earlier_and_no_later_writes",
];

/// Arguments that select the tests of a module. A test is selected if its name contains the module's, so modules whose
/// names end with it (`infra_ha` for `ha`, `kubevirt::crash` for `crash`) are excluded.
pub(super) fn tests_of(module: &str, modules: &[String]) -> Vec<String> {
    let tests = |module: &str| format!("{module}::");
    let others = modules.iter().filter(|other| *other != module && other.ends_with(module));
    let excluded = others.flat_map(|other| ["--skip".to_owned(), tests(other)]);
    std::iter::once(tests(module)).chain(excluded).collect()
}

/// Arguments that exclude the long tests of a module.
pub(super) fn without_long_tests(module: &str) -> Vec<String> {
    let long = LONG_TESTS.iter().filter(|test| test.starts_with(&format!("{module}::")));
    long.flat_map(|test| ["--skip", test]).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::repository;

    #[test]
    fn a_module_whose_name_ends_like_another_does_not_run_with_it() {
        let modules = ["ha", "infra_ha", "haste"].map(str::to_owned);
        assert_eq!(tests_of("ha", &modules), ["ha::", "--skip", "infra_ha::"]);
        assert_eq!(tests_of("infra_ha", &modules), ["infra_ha::"]);
        let modules = ["crash", "kubevirt", "kubevirt::crash"].map(str::to_owned);
        assert_eq!(tests_of("crash", &modules), ["crash::", "--skip", "kubevirt::crash::"]);
        assert_eq!(tests_of("kubevirt", &modules), ["kubevirt::"]);
    }

    #[test]
    fn the_tests_named_here_exist() {
        for name in [&ON_BOTH_ENGINES[..], &ON_KUBEVIRT, &LONG_TESTS].concat() {
            let (module, test) = name.rsplit_once("::").unwrap();
            let module = module.replace("::", "/");
            let file = repository().join(format!("tests/tests/{module}.rs"));
            let text = std::fs::read_to_string(file).unwrap();
            assert!(text.contains(&format!("async fn {test}() ")), "{name}");
        }
    }
}
