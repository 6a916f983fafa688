//! Manifests of a guest in the management cluster: the files of the chart nestor-management, filled as its template
//! `guests.yaml` fills them.

/// Namespace, account, rights and credential.
const ACCOUNT: &str = include_str!("../../../charts/nestor-management/files/guest.yaml");
/// Admission policies and their bindings.
const ADMISSION: &str = include_str!("../../../charts/nestor-management/files/admission.yaml");

/// Rights on VMs of KubeVirt.
const KUBEVIRT: &str = include_str!("../../../charts/nestor-management/files/kubevirt.yaml");
/// Admission policy of VMs of KubeVirt, and its binding.
const KUBEVIRT_ADMISSION: &str =
    include_str!("../../../charts/nestor-management/files/kubevirt-admission.yaml");
/// Admission policies of the records which VM of KubeVirt has a claim, and their bindings.
const KUBEVIRT_HOLDERS: &str = include_str!("../../../charts/nestor-management/files/kubevirt-holders.yaml");

/// Subject of the admission policy that contains the classes.
pub const CLAIMS: &str = "claims";
/// Subjects of the admission policies.
pub const POLICIES: [&str; 5] = [CLAIMS, "classes", "snapshots", "vms", "events"];
/// Subjects of the admission policies with KubeVirt.
pub const KUBEVIRT_POLICIES: [&str; 4] =
    ["kubevirt", "kubevirt-claims", "kubevirt-records", "kubevirt-instances"];

/// Name of the admission policy of an account about a subject.
pub fn policy(subject: &str, account: &str, namespace: &str) -> String {
    format!("{subject}.{account}.{namespace}.nestor.dev")
}

/// What the placeholders of the files stand for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// Namespace of its claims and VirtualMachines.
    pub namespace: String,
    /// Name of its ServiceAccount.
    pub account: String,
    /// Name of its Cluster object.
    pub cluster_object: String,
    /// Its cluster ID.
    pub cluster_id: String,
    /// Classes that it may use; empty: all.
    pub classes: Vec<String>,
    /// Whether it may change VirtualMachines without a label of a guest.
    pub takes_unlabelled_vms: bool,
    /// Namespace of mgmt-csi.
    pub system_namespace: String,
}

impl Guest {
    /// YAML documents: namespace, account, credential, roles and their bindings.
    pub fn account_objects(&self) -> String {
        self.fill(ACCOUNT)
    }

    /// YAML documents: admission policies and their bindings.
    pub fn admission_policies(&self) -> String {
        self.fill(ADMISSION)
    }

    /// YAML documents for VMs of KubeVirt: role and its binding.
    pub fn kubevirt_account_objects(&self) -> String {
        self.fill(KUBEVIRT)
    }

    /// YAML documents for VMs of KubeVirt: admission policies and their bindings.
    pub fn kubevirt_policies(&self) -> String {
        format!("{}---\n{}", self.fill(KUBEVIRT_ADMISSION), self.fill(KUBEVIRT_HOLDERS))
    }

    /// YAML documents for VMs of KubeVirt: admission policies, role and their bindings.
    pub fn kubevirt_objects(&self) -> String {
        format!("{}---\n{}", self.kubevirt_policies(), self.kubevirt_account_objects())
    }

    fn fill(&self, file: &str) -> String {
        file.replace("${NAMESPACE}", &self.namespace)
            .replace("${ACCOUNT}", &self.account)
            .replace("${CLUSTER}", &self.cluster_object)
            .replace("${CLUSTER_ID}", &self.cluster_id)
            .replace("${CLASSES}", &to_cel(&self.classes))
            .replace("${UNLABELLED_VMS}", &self.takes_unlabelled_vms.to_string())
            .replace("${SYSTEM_NAMESPACE}", &self.system_namespace)
    }
}

/// A list of names in CEL.
fn to_cel(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("'{name}'")).collect();
    format!("[{}]", quoted.join(", "))
}

/// The names in a list in CEL, as an admission policy contains it.
pub fn from_cel(list: &str) -> Vec<String> {
    let inner = list.trim().trim_start_matches('[').trim_end_matches(']');
    let names = inner.split(',').map(|name| name.trim().trim_matches('\''));
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(classes: &[&str]) -> Guest {
        Guest {
            namespace: "guest-shop".into(),
            account: "shop".into(),
            cluster_object: "shop-cluster".into(),
            cluster_id: "id-1".into(),
            classes: classes.iter().map(|&class| class.to_owned()).collect(),
            takes_unlabelled_vms: false,
            system_namespace: "nestor-system".into(),
        }
    }

    /// The text without comments, which explain the placeholders.
    fn without_comments(text: &str) -> String {
        text.lines()
            .filter(|line| !line.trim_start().starts_with('#'))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// The text has these policies with their bindings, and no others.
    fn has_policies(guest: &Guest, text: &str, subjects: &[&str]) {
        for subject in subjects {
            let name = format!("\n  name: {}\n", policy(subject, &guest.account, &guest.namespace));
            assert_eq!(text.matches(&name).count(), 2, "the policy of {subject} and its binding");
        }
        assert_eq!(text.matches("kind: ValidatingAdmissionPolicy\n").count(), subjects.len());
    }

    #[test]
    fn no_placeholder_is_left() {
        let guest = guest(&["gold"]);
        for text in [guest.account_objects(), guest.admission_policies(), guest.kubevirt_objects()] {
            let text = without_comments(&text);
            assert!(!text.contains("${"), "{text}");
        }
        let account = guest.account_objects();
        assert!(
            account.contains("nestor.dev/cluster-id: \"id-1\"") && account.contains("[\"shop-cluster\"]")
        );
        has_policies(&guest, &guest.admission_policies(), &POLICIES);
        has_policies(&guest, &guest.kubevirt_policies(), &KUBEVIRT_POLICIES);
    }

    #[test]
    fn no_policy_refuses_everything_while_its_parameters_are_missing() {
        let guest = guest(&[]);
        for text in [guest.admission_policies(), guest.kubevirt_policies()] {
            let text = without_comments(&text);
            let permits = text.matches("parameterNotFoundAction: Allow\n").count();
            assert_eq!(permits, text.matches("paramKind:\n").count());
            assert_eq!(permits, text.matches("parameterNotFoundAction").count());
        }
    }

    #[test]
    fn classes_are_a_list_in_cel() {
        let names = ["gold".to_owned(), "silver.example".to_owned()];
        assert_eq!(to_cel(&names), "['gold', 'silver.example']");
        assert_eq!(from_cel(&to_cel(&names)), names);
        assert_eq!((to_cel(&[]), from_cel("[]")), ("[]".to_owned(), Vec::new()));
        assert!(guest(&["gold"]).admission_policies().contains("expression: \"['gold']\""));
    }
}
