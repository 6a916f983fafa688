//! Which role may do what, and with whose objects. Pure: [`super::client`] reads the roles from certificates, and applies the
//! decision.

use infra_api::{Role, RoleClaim, account_organization};

use crate::scope::Scope;

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
    PutImport,
    GetImport,
    ImportVolume,
    ExportVolume,
    ExportSnapshot,
    AdoptVolume,
    ReleaseVolume,
    AcceptVolume,
    SuspendVolume,
    ResumeVolume,
    SuspendPool,
    ResumePool,
    MoveVolume,
    CancelMove,
    DrainPool,
    CancelDrain,
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
    ListHosts,
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
const ROUTES: [(&str, &str, Operation); 51] = [
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
    ("PUT", "/v1/volumes/{id}/import", PutImport),
    ("GET", "/v1/volumes/{id}/import", GetImport),
    ("PUT", "/v1/volumes/{id}/data", ImportVolume),
    ("GET", "/v1/volumes/{id}/data", ExportVolume),
    ("PUT", "/v1/volumes/{id}/adoption", AdoptVolume),
    ("PUT", "/v1/volumes/{id}/release", ReleaseVolume),
    ("DELETE", "/v1/volumes/{id}/alteration", AcceptVolume),
    ("PUT", "/v1/volumes/{id}/suspension", SuspendVolume),
    ("DELETE", "/v1/volumes/{id}/suspension", ResumeVolume),
    ("PUT", "/v1/pools/{name}/suspension", SuspendPool),
    ("DELETE", "/v1/pools/{name}/suspension", ResumePool),
    ("PUT", "/v1/volumes/{id}/move", MoveVolume),
    ("DELETE", "/v1/volumes/{id}/move", CancelMove),
    ("PUT", "/v1/pools/{name}/drain", DrainPool),
    ("DELETE", "/v1/pools/{name}/drain", CancelDrain),
    ("GET", "/v1/budgets", ListBudgets),
    ("GET", "/v1/budgets/{account}", GetBudget),
    ("PUT", "/v1/budgets/{account}", PutBudget),
    ("DELETE", "/v1/budgets/{account}", DeleteBudget),
    ("GET", "/v1/snapshots", ListSnapshots),
    ("GET", "/v1/snapshots/{id}", GetSnapshot),
    ("PUT", "/v1/snapshots/{id}", PutSnapshot),
    ("DELETE", "/v1/snapshots/{id}", DeleteSnapshot),
    ("GET", "/v1/snapshots/{id}/data", ExportSnapshot),
    ("GET", "/v1/nodes", ListNodes),
    ("GET", "/v1/nodes/{uuid}", GetNode),
    ("PUT", "/v1/nodes/{uuid}", PutNode),
    ("DELETE", "/v1/nodes/{uuid}", DeleteNode),
    ("DELETE", "/v1/nodes/{uuid}/saved-state", DeleteSavedState),
    ("GET", "/v1/hosts", ListHosts),
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
        PutSnapshot | DeleteSnapshot => &[Role::Driver, Role::Operator, Role::Backup],
        ListPools | GetPool | ListBudgets | GetBudget | ListNodes | GetNode | ListHosts | ListAttachments
        | GetAttachment | GetCapacity | GetEvents => &[Role::Driver, Role::Operator, Role::Reader],
        PutVolume | DeleteVolume | ExpandVolume | PutQos | PutOwner | PutBudget | DeleteBudget | PutNode
        | DeleteNode | PutAttachment | DeleteAttachment | AdoptVolume => &[Role::Driver, Role::Operator],
        PutPool | DeletePool | DeleteSavedState | DeleteHost | AcceptVolume | SuspendVolume
        | ResumeVolume | SuspendPool | ResumePool | MoveVolume | CancelMove | DrainPool | CancelDrain => {
            &[Role::Operator]
        }
        PutImport | GetImport | ImportVolume | ExportVolume | ExportSnapshot | ReleaseVolume => {
            &[Role::Operator]
        }
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
        "the organizations {} of the client certificate are not one role: exactly one organization must be {}; one that begins \
         with {} is needed beside {}, and permitted beside no other",
        .0.join(", "), organizations(&Role::ALL), account_organization(""), of_one_account()
    )]
    InvalidRole(Vec<String>),
    #[error(
        "the role {role} of the client certificate is for the volumes of one account, and the certificate names none: issue one \
         with `storage-infra pki issue --role {role} --account ACCOUNT`, or one whose subject has the organizations (O) {of_role} \
         and {of_account}; ACCOUNT is the cluster ID of a guest",
        role = .0, of_role = .0.organization(), of_account = account_organization("ACCOUNT")
    )]
    NoAccount(Role),
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

/// The organizations of roles that are for one account.
fn of_one_account() -> String {
    organizations(&Role::ALL.into_iter().filter(|role| role.is_of_one_account()).collect::<Vec<_>>())
}

/// Decides about a request, and which objects exist for its client. Another method than those of the route is answered with
/// 405, to operators only.
pub(super) fn decide(
    claim: &RoleClaim,
    without: WithoutRole,
    (method, route): (&str, &str),
) -> Result<Scope, Refusal> {
    let (role, scope) = match (claim, without) {
        (RoleClaim::Role(role), _) => (*role, Scope::All),
        (RoleClaim::OfAccount(role, account), _) => (*role, Scope::Account(*role, account.clone())),
        (RoleClaim::WithoutAccount(role), _) => return Err(Refusal::NoAccount(*role)),
        (RoleClaim::None, WithoutRole::Operator) => (Role::Operator, Scope::All),
        (RoleClaim::None, WithoutRole::Refuse) => return Err(Refusal::NoRole),
        (RoleClaim::Invalid(organizations), _) => return Err(Refusal::InvalidRole(organizations.clone())),
    };
    let operation = Operation::of(method, route);
    let may = |role: &Role| operation.map_or(*role == Role::Operator, |operation| allows(*role, operation));
    if may(&role) {
        return Ok(scope);
    }
    let needed = Role::ALL.into_iter().filter(may).collect();
    Err(Refusal::Forbidden { role, request: format!("{method} {route}"), needed })
}

/// Decides who reads the metrics, which are of all accounts: any client, but none of one account.
pub(super) fn decide_metrics(claim: &RoleClaim) -> Result<(), Refusal> {
    match claim {
        RoleClaim::Role(_) | RoleClaim::None => Ok(()),
        RoleClaim::OfAccount(role, _) | RoleClaim::WithoutAccount(role) => {
            let needed = Role::ALL.into_iter().filter(|role| !role.is_of_one_account()).collect();
            Err(Refusal::Forbidden { role: *role, request: "GET /metrics".to_owned(), needed })
        }
        RoleClaim::Invalid(organizations) => Err(Refusal::InvalidRole(organizations.clone())),
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{Account, Owner};

    use super::*;

    const PAGE: &str = include_str!("../../../docs/reference/infra-roles.md");

    /// What the table shows: a role of one account has only the objects of the account.
    fn shown(role: Role, operation: Operation) -> &'static str {
        match allows(role, operation) {
            false => "–",
            true if role.is_of_one_account() && !matches!(operation, GetHealth | GetDocs) => "own",
            true => "yes",
        }
    }

    /// The table of the page.
    fn table() -> String {
        let mut text = String::from("| operation |");
        Role::ALL.iter().for_each(|role| text.push_str(&format!(" {role} |")));
        text.push_str("\n| --- | --- | --- | --- | --- |\n");
        for (method, route, operation) in ROUTES {
            text.push_str(&format!("| `{method} {route}` |"));
            for role in Role::ALL {
                text.push_str(&format!(" {} |", shown(role, operation)));
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
        assert_eq!(decide(&reader, ("GET", "/v1/pools")), Ok(Scope::All));
        assert_eq!(decide(&reader, ("HEAD", "/v1/pools")), Ok(Scope::All));
        let refused = decide(&reader, ("DELETE", "/v1/volumes/{id}")).unwrap_err().to_string();
        assert!(
            refused.contains("role reader") && refused.contains("nestor:driver or nestor:operator"),
            "{refused}"
        );
        let driver = RoleClaim::Role(Role::Driver);
        assert!(decide(&driver, ("DELETE", "/v1/pools/{name}")).is_err());
        assert!(decide(&driver, ("POST", "/v1/pools")).is_err());
        assert_eq!(decide(&RoleClaim::Role(Role::Operator), ("POST", "/v1/pools")), Ok(Scope::All));
    }

    /// A client of each role, of the account `a` if the role is for one.
    fn clients() -> impl Iterator<Item = (Role, RoleClaim)> {
        let claim = |role: Role| match role.is_of_one_account() {
            true => RoleClaim::OfAccount(role, account("a")),
            false => RoleClaim::Role(role),
        };
        Role::ALL.into_iter().map(move |role| (role, claim(role)))
    }

    fn account(name: &str) -> Account {
        Account::new(name).unwrap()
    }

    /// Whether a client may do an operation with an object of an owner.
    fn reaches(claim: &RoleClaim, (method, route): (&str, &str), owner: &str) -> bool {
        let owner = Owner { account: account(owner), class: String::new() };
        decide(claim, WithoutRole::Refuse, (method, route)).is_ok_and(|scope| scope.includes(&owner))
    }

    #[test]
    fn each_role_reaches_in_each_operation_the_objects_of_all_owners_or_of_its_account() {
        for (method, route, operation) in ROUTES {
            for (role, claim) in clients() {
                for owner in ["", "a", "b"] {
                    let expected = allows(role, operation) && (role != Role::Backup || owner == "a");
                    let found = reaches(&claim, (method, route), owner);
                    assert_eq!(found, expected, "{role}: {method} {route} of {owner:?}");
                }
            }
        }
    }

    #[test]
    fn a_backup_without_an_account_is_refused_everything_with_a_way_out() {
        let claim = RoleClaim::WithoutAccount(Role::Backup);
        for (method, route, _) in ROUTES {
            for without in [WithoutRole::Operator, WithoutRole::Refuse] {
                let refused = decide(&claim, without, (method, route)).unwrap_err().to_string();
                assert!(refused.contains("storage-infra pki issue --role backup --account"), "{refused}");
                assert!(refused.contains("nestor:backup and nestor:account:ACCOUNT"), "{refused}");
            }
        }
        assert!(decide_metrics(&claim).is_err());
    }

    #[test]
    fn no_client_of_one_account_reads_the_metrics() {
        for (role, claim) in clients() {
            assert_eq!(decide_metrics(&claim).is_ok(), !role.is_of_one_account(), "{role}");
        }
        assert_eq!(decide_metrics(&RoleClaim::None), Ok(()));
        assert!(decide_metrics(&RoleClaim::Invalid(vec!["nestor:account:a".into()])).is_err());
    }

    #[test]
    fn a_certificate_without_a_role_is_refused_or_an_operators() {
        let request = ("DELETE", "/v1/pools/{name}");
        assert_eq!(decide(&RoleClaim::None, WithoutRole::Operator, request), Ok(Scope::All));
        let refused = decide(&RoleClaim::None, WithoutRole::Refuse, request).unwrap_err().to_string();
        assert!(refused.contains("has no role") && refused.contains("pki issue --role"), "{refused}");
        let invalid = RoleClaim::Invalid(vec!["nestor:root".into()]);
        let refused = decide(&invalid, WithoutRole::Operator, request).unwrap_err().to_string();
        assert!(refused.contains("nestor:root"), "{refused}");
    }
}
