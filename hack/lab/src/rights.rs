//! RBAC rules of the charts, one right per verb, and their reasons in `docs/reference/rights.md`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Files with roles, which the charts and the lab apply.
const FILES: [&str; 10] = [
    include_str!("../../../charts/nestor-management/files/management.yaml"),
    include_str!("../../../charts/nestor-management/files/cluster-api.yaml"),
    include_str!("../../../charts/nestor-management/files/node-service.yaml"),
    include_str!("../../../charts/nestor-management/files/guest.yaml"),
    include_str!("../../../charts/nestor-management/files/kubevirt.yaml"),
    include_str!("../../../charts/nestor-guest/files/guest.yaml"),
    include_str!("../../../charts/nestor-guest/files/capacity-owner.yaml"),
    include_str!("../../../charts/nestor-guest/files/management-credential.yaml"),
    include_str!("../../../charts/shared/sidecars.yaml"),
    include_str!("../../../charts/shared/metrics-auth.yaml"),
];

/// Page with the reasons.
const PAGE: &str = include_str!("../../../docs/reference/rights.md");

/// One verb of one resource in one role.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Right {
    /// Kind and name of the role, with `ACCOUNT` for the account of a guest: `ClusterRole nestor:mgmt-csi`.
    pub role: String,
    /// API group; `core` for the core group, empty for a non-resource URL.
    pub group: String,
    /// Resource with its subresource, or the URL.
    pub resource: String,
    /// Names of the objects, separated by commas; empty for all.
    pub names: String,
    /// The verb.
    pub verb: String,
}

#[derive(Deserialize)]
struct Object {
    kind: String,
    metadata: Metadata,
    #[serde(default)]
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rule {
    #[serde(default)]
    api_groups: Vec<String>,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
    #[serde(default, rename = "nonResourceURLs")]
    urls: Vec<String>,
    verbs: Vec<String>,
}

/// All rights of all roles. A right that is granted twice is an error.
pub fn granted() -> Result<Vec<Right>> {
    let mut rights = Vec::new();
    for text in FILES.iter().flat_map(|file| file.split("\n---\n")) {
        let object: Object = serde_saphyr::from_str(text).with_context(|| text.to_owned())?;
        let name = object.metadata.name.replace("${ACCOUNT}", "ACCOUNT");
        let role = format!("{} {name}", object.kind);
        object.rules.iter().for_each(|rule| rights.extend(of_rule(&role, rule)));
    }
    rights.sort();
    let twice = rights.windows(2).find(|pair| pair[0] == pair[1]);
    ensure!(twice.is_none(), "granted twice: {twice:?}");
    Ok(rights)
}

fn of_rule(role: &str, rule: &Rule) -> Vec<Right> {
    let names = rule.resource_names.join(", ").replace("${", "").replace('}', "");
    let groups = rule.api_groups.iter().map(|group| if group.is_empty() { "core" } else { group.as_str() });
    let resources = groups.flat_map(|group| rule.resources.iter().map(move |resource| (group, resource)));
    let targets = resources.chain(rule.urls.iter().map(|url| ("", url)));
    targets
        .flat_map(|(group, resource)| rule.verbs.iter().map(move |verb| (group, resource, verb)))
        .map(|(group, resource, verb)| Right {
            role: role.to_owned(),
            group: group.to_owned(),
            resource: resource.clone(),
            names: names.clone(),
            verb: verb.clone(),
        })
        .collect()
}

/// The rights in the tables of a page with their reasons. A table belongs to the role in the heading before it:
/// `### ClusterRole nestor:mgmt-csi`, with the columns API group, resource, names, verbs and reason.
pub fn documented(page: &str) -> Result<BTreeMap<Right, String>> {
    let mut reasons = BTreeMap::new();
    let mut role = None;
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            role = Some(heading.replace('`', ""));
        }
        let Some(role) = &role else { continue };
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [group, resource, names, verbs, reason] = cells[..] else { continue };
        if group == "API group" || group.starts_with("---") {
            continue;
        }
        for verb in verbs.split(", ") {
            let plain = |cell: &str| cell.replace('`', "");
            let right = Right {
                role: role.clone(),
                group: plain(group),
                resource: plain(resource),
                names: plain(names),
                verb: verb.to_owned(),
            };
            ensure!(reason.len() > 10, "{right:?} has no reason");
            ensure!(reasons.insert(right.clone(), reason.to_owned()).is_none(), "{right:?} has two reasons");
        }
    }
    Ok(reasons)
}

/// The rights in `docs/reference/rights.md` with their reasons.
pub fn reasons() -> Result<BTreeMap<Right, String>> {
    documented(PAGE)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::run::repository;

    #[test]
    fn every_right_has_a_reason_in_the_reference_and_every_reason_a_right() {
        let granted: BTreeSet<Right> = granted().unwrap().into_iter().collect();
        let reasons: BTreeSet<Right> = reasons().unwrap().into_keys().collect();
        let unexplained: Vec<&Right> = granted.difference(&reasons).collect();
        assert!(unexplained.is_empty(), "docs/reference/rights.md has no reason for {unexplained:#?}");
        let outdated: Vec<&Right> = reasons.difference(&granted).collect();
        assert!(
            outdated.is_empty(),
            "docs/reference/rights.md has reasons for rights that no role grants: {outdated:#?}"
        );
    }

    #[test]
    fn no_right_has_a_wildcard() {
        for right in granted().unwrap() {
            let parts = [&right.group, &right.resource, &right.verb];
            assert!(parts.iter().all(|part| !part.contains('*')), "{right:?}");
        }
    }

    #[test]
    fn templates_contain_no_rules() {
        for chart in ["nestor-guest/templates", "nestor-management/templates", "shared"] {
            for file in std::fs::read_dir(repository().join("charts").join(chart)).unwrap() {
                let path = file.unwrap().path();
                let is_listed = path.extension().is_some_and(|kind| kind == "yaml") && chart == "shared";
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(is_listed || !text.contains("apiGroups:"), "{} has rules", path.display());
            }
        }
    }

    #[test]
    fn a_page_lists_one_right_per_verb() {
        let page = "### `Role a`\n\n| API group | resource | names | verbs | reason |\n| --- | --- | --- | --- | --- |\n\
                    | core | `leases` | `x` | get, update | the leader election |\n";
        let reasons = documented(page).unwrap();
        let verbs: Vec<&str> = reasons.keys().map(|right| right.verb.as_str()).collect();
        assert_eq!(verbs, ["get", "update"]);
        assert!(reasons.keys().all(|right| right.role == "Role a" && right.names == "x"));
        assert!(documented(&page.replace("the leader election", "")).is_err());
    }
}
