//! Which role may do what. Pure: [`super::client`] reads the roles from certificates, and applies the decision.

use infra_api::{Role, RoleClaim};

/// An operation of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    ListPools,
    GetPool,
    PutPool,
    DeletePool,
    ListVolumes,
    GetVolume,
    PutVolume,
    DeleteVolume,
    ExpandVolume,
    PutQos,
    PutOwner,
    ListBudgets,
    GetBudget,
    PutBudget,
    DeleteBudget,
    ListSnapshots,
    GetSnapshot,
    PutSnapshot,
    DeleteSnapshot,
    ListNodes,
    GetNode,
    PutNode,
    DeleteNode,
    DeleteSavedState,
    DeleteHost,
    ListAttachments,
    GetAttachment,
    PutAttachment,
    DeleteAttachment,
    GetCapacity,
    GetHealth,
    GetEvents,
    GetDocs,
}

use Operation::*;

/// The operation of each method and route.
const ROUTES: [(&str, &str, Operation); 34] = [
    ("GET", "/v1/pools", ListPools),
    ("GET", "/v1/pools/{name}", GetPool),
    ("PUT", "/v1/pools/{name}", PutPool),
    ("DELETE", "/v1/pools/{name}", DeletePool),
    ("GET", "/v1/volumes", ListVolumes),
    ("GET", "/v1/volumes/{id}", GetVolume),
    ("PUT", "/v1/volumes/{id}", PutVolume),
    ("DELETE", "/v1/volumes/{id}", DeleteVolume),
    ("PUT", "/v1/volumes/{id}/size", ExpandVolume),
    ("PUT", "/v1/volumes/{id}/qos", PutQos),
    ("PUT", "/v1/volumes/{id}/owner", PutOwner),
    ("GET", "/v1/budgets", ListBudgets),
    ("GET", "/v1/budgets/{account}", GetBudget),
    ("PUT", "/v1/budgets/{account}", PutBudget),
    ("DELETE", "/v1/budgets/{account}", DeleteBudget),
    ("GET", "/v1/snapshots", ListSnapshots),
    ("GET", "/v1/snapshots/{id}", GetSnapshot),
    ("PUT", "/v1/snapshots/{id}", PutSnapshot),
    ("DELETE", "/v1/snapshots/{id}", DeleteSnapshot),
    ("GET", "/v1/nodes", ListNodes),
    ("GET", "/v1/nodes/{uuid}", GetNode),
    ("PUT", "/v1/nodes/{uuid}", PutNode),
    ("DELETE", "/v1/nodes/{uuid}", DeleteNode),
    ("DELETE", "/v1/nodes/{uuid}/saved-state", DeleteSavedState),
    ("DELETE", "/v1/hypervisors/{name}/host", DeleteHost),
    ("GET", "/v1/attachments", ListAttachments),
    ("GET", "/v1/attachments/{id}", GetAttachment),
    ("PUT", "/v1/attachments/{id}", PutAttachment),
    ("DELETE", "/v1/attachments/{id}", DeleteAttachment),
    ("GET", "/v1/capacity", GetCapacity),
    ("GET", "/v1/health", GetHealth),
    ("GET", "/v1/events", GetEvents),
    ("GET", "/v1/openapi.json", GetDocs),
    ("GET", "/v1/docs", GetDocs),
];

impl Operation {
    /// The operation of a request. A HEAD is served as a GET without its body.
    pub(super) fn of(method: &str, route: &str) -> Option<Self> {
        let method = if method == "HEAD" { "GET" } else { method };
        ROUTES.iter().find(|(m, r, _)| (*m, *r) == (method, route)).map(|(_, _, operation)| *operation)
    }
}

/// Whether a role may do an operation.
pub(super) fn allows(role: Role, operation: Operation) -> bool {
    let roles: &[Role] = match operation {
        GetHealth | GetDocs => &Role::ALL,
        ListVolumes | GetVolume | ListSnapshots | GetSnapshot => &Role::ALL,
        PutSnapshot => &[Role::Driver, Role::Operator, Role::Backup],
        ListPools | GetPool | ListBudgets | GetBudget | ListNodes | GetNode | ListAttachments
        | GetAttachment | GetCapacity | GetEvents => &[Role::Driver, Role::Operator, Role::Reader],
        PutVolume | DeleteVolume | ExpandVolume | PutQos | PutOwner | PutBudget | DeleteBudget
        | DeleteSnapshot | PutAttachment | DeleteAttachment => &[Role::Driver, Role::Operator],
        PutPool | DeletePool | PutNode | DeleteNode | DeleteSavedState | DeleteHost => &[Role::Operator],
    };
    roles.contains(&role)
}

/// What clients may do whose certificates have no role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum WithoutRole {
    /// Everything, as the role operator.
    Operator,
    /// Nothing.
    Refuse,
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error(
        "the client certificate has no role, and --clients-without-role is refuse: use one of `storage-infra pki issue --role \
         ROLE`, or one whose subject has the organization (O) {}",
        organizations(&Role::ALL)
    )]
    NoRole,
    #[error(
        "the organizations {} of the client certificate are not one role: exactly one organization must be {}",
        .0.join(", "), organizations(&Role::ALL)
    )]
    InvalidRole(Vec<String>),
    #[error(
        "the role {role} of the client certificate does not allow {request}: use a certificate with the organization (O) {}, \
         for example of `storage-infra pki issue`",
        organizations(needed)
    )]
    Forbidden { role: Role, request: String, needed: Vec<Role> },
}

fn organizations(roles: &[Role]) -> String {
    roles.iter().map(|role| role.organization()).collect::<Vec<_>>().join(" or ")
}

/// Decides about a request. Another method than those of the route is answered with 405, to operators only.
pub(super) fn decide(
    claim: &RoleClaim,
    without: WithoutRole,
    (method, route): (&str, &str),
) -> Result<(), Refusal> {
    let role = match (claim, without) {
        (RoleClaim::Role(role), _) => *role,
        (RoleClaim::None, WithoutRole::Operator) => Role::Operator,
        (RoleClaim::None, WithoutRole::Refuse) => return Err(Refusal::NoRole),
        (RoleClaim::Invalid(organizations), _) => return Err(Refusal::InvalidRole(organizations.clone())),
    };
    let operation = Operation::of(method, route);
    let may = |role: &Role| operation.map_or(*role == Role::Operator, |operation| allows(*role, operation));
    if may(&role) {
        return Ok(());
    }
    let needed = Role::ALL.into_iter().filter(may).collect();
    Err(Refusal::Forbidden { role, request: format!("{method} {route}"), needed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../docs/reference/infra-roles.md");

    /// The table of the page.
    fn table() -> String {
        let mut text = String::from("| operation |");
        Role::ALL.iter().for_each(|role| text.push_str(&format!(" {role} |")));
        text.push_str("\n| --- | --- | --- | --- | --- |\n");
        for (method, route, operation) in ROUTES {
            text.push_str(&format!("| `{method} {route}` |"));
            for role in Role::ALL {
                text.push_str(if allows(role, operation) { " yes |" } else { " – |" });
            }
            text.push('\n');
        }
        text
    }

    #[test]
    fn the_reference_page_shows_what_each_role_may_do() {
        assert!(
            PAGE.contains(&table()),
            "docs/reference/infra-roles.md must contain this table:\n{}",
            table()
        );
    }

    #[test]
    fn every_documented_operation_has_roles() {
        let document = serde_json::to_value(super::super::openapi()).unwrap();
        let mut operations = 0;
        for (route, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                let method = method.to_ascii_uppercase();
                assert!(Operation::of(&method, route).is_some(), "{method} {route}");
                operations += 1;
            }
        }
        // And the two of the documentation itself.
        assert_eq!(operations + 2, ROUTES.len());
    }

    #[test]
    fn a_role_is_refused_what_others_may_with_a_way_out() {
        let decide = |claim: &RoleClaim, request| decide(claim, WithoutRole::Refuse, request);
        let reader = RoleClaim::Role(Role::Reader);
        assert_eq!(decide(&reader, ("GET", "/v1/pools")), Ok(()));
        assert_eq!(decide(&reader, ("HEAD", "/v1/pools")), Ok(()));
        let refused = decide(&reader, ("DELETE", "/v1/volumes/{id}")).unwrap_err().to_string();
        assert!(
            refused.contains("role reader") && refused.contains("nestor:driver or nestor:operator"),
            "{refused}"
        );
        let driver = RoleClaim::Role(Role::Driver);
        assert!(decide(&driver, ("DELETE", "/v1/pools/{name}")).is_err());
        assert!(decide(&driver, ("POST", "/v1/pools")).is_err());
        assert_eq!(decide(&RoleClaim::Role(Role::Operator), ("POST", "/v1/pools")), Ok(()));
    }

    #[test]
    fn a_certificate_without_a_role_is_refused_or_an_operators() {
        let request = ("DELETE", "/v1/pools/{name}");
        assert_eq!(decide(&RoleClaim::None, WithoutRole::Operator, request), Ok(()));
        let refused = decide(&RoleClaim::None, WithoutRole::Refuse, request).unwrap_err().to_string();
        assert!(refused.contains("has no role") && refused.contains("pki issue --role"), "{refused}");
        let invalid = RoleClaim::Invalid(vec!["nestor:root".into()]);
        let refused = decide(&invalid, WithoutRole::Operator, request).unwrap_err().to_string();
        assert!(refused.contains("nestor:root"), "{refused}");
    }
}
