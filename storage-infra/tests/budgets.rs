//! Budgets: refusals with numbers that reserve nothing, what counts, and changes of the owner. Runs as root.

use crate::support::*;
use futures::future::join_all;
use infra_api::{
    Account, BudgetLimit, BudgetSpec, ClassLimits, ClientError, Owner, ProblemCode, SnapshotSpec, VolumeSize,
    VolumeSpec,
};

fn account(name: &str) -> Account {
    Account::new(name).unwrap()
}

fn of_guest(bytes: u64, class: &str) -> VolumeSpec {
    VolumeSpec { owner: Owner { account: account("g1"), class: class.into() }, ..size(bytes) }
}

/// The limit that a refused request exceeds: what is used, requested and allowed.
fn excess<T: std::fmt::Debug>(result: Result<T, ClientError>) -> (BudgetLimit, u64, u64, u64) {
    let error = result.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!(problem.code, ProblemCode::OverBudget, "{problem}");
    let excess = problem.excess.clone().unwrap();
    assert_eq!(excess.owner.account, account("g1"));
    (excess.limit, excess.used, excess.requested, excess.allowed)
}

async fn used(server: &Server, name: &str) -> (u64, u64, u64) {
    let used = server.client.get_budget(&account(name)).await.unwrap().used;
    (used.bytes, used.volumes, used.snapshots)
}

#[tokio::test]
async fn requests_beyond_the_budget_reserve_nothing_and_deletions_give_back() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let client = &server.client;
    let gold = ClassLimits { bytes: Some(6 * MIB), volumes: None };
    let limits = BudgetSpec {
        bytes: Some(10 * MIB),
        snapshots_per_volume: Some(1),
        classes: [("gold".to_owned(), gold)].into(),
        ..BudgetSpec::default()
    };
    client.put_budget(&account("g1"), &limits).await.unwrap();
    client.put_volume(&volume("a"), &of_guest(4 * MIB, "gold"), SOON).await.unwrap();
    let refused = client.put_volume(&volume("b"), &of_guest(4 * MIB, "gold"), SOON).await;
    assert_eq!(excess(refused), (BudgetLimit::ClassBytes, 4 * MIB, 4 * MIB, 6 * MIB));
    let refused = client.put_volume(&volume("b"), &of_guest(7 * MIB, "iron"), SOON).await;
    assert_eq!(excess(refused), (BudgetLimit::Bytes, 4 * MIB, 7 * MIB, 10 * MIB));
    assert_eq!(client.get_volume(&volume("b")).await.unwrap(), None);
    let clone = VolumeSpec { owner: of_guest(1, "iron").owner, ..cloned(&volume("a"), 7 * MIB) };
    assert_eq!(excess(client.put_volume(&volume("b"), &clone, SOON).await).0, BudgetLimit::Bytes);
    let larger = VolumeSize { capacity_bytes: 7 * MIB, limit_bytes: None };
    let refused = client.expand_volume(&volume("a"), &larger).await;
    assert_eq!(excess(refused), (BudgetLimit::ClassBytes, 4 * MIB, 3 * MIB, 6 * MIB));
    assert_eq!(client.get_volume(&volume("a")).await.unwrap().unwrap().capacity_bytes, 4 * MIB);
    // A repetition of a request is no new request.
    client.put_volume(&volume("a"), &of_guest(4 * MIB, "gold"), SOON).await.unwrap();
    // Other accounts, and no account, are not limited.
    client.put_volume(&volume("other"), &size(8 * MIB), SOON).await.unwrap();
    assert_eq!(site.files(), ["a.raw", "other.raw"]);
    assert_eq!(used(&server, "g1").await, (4 * MIB, 1, 0));

    site.write(&volume("a"), &[1; MIB as usize], 0);
    client.put_snapshot(&snapshot("s"), &of(&volume("a")), SOON).await.unwrap();
    let (bytes, volumes, snapshots) = used(&server, "g1").await;
    assert!(bytes >= 5 * MIB && (volumes, snapshots) == (1, 1), "{bytes}");
    let refused = client.put_snapshot(&snapshot("t"), &of(&volume("a")), SOON).await;
    assert_eq!(excess(refused), (BudgetLimit::SnapshotsPerVolume, 1, 1, 1));
    assert_eq!(client.get_snapshot(&snapshot("t")).await.unwrap(), None);
    // The snapshot of another account counts there.
    let foreign = SnapshotSpec { account: account("g2"), ..of(&volume("a")) };
    client.put_snapshot(&snapshot("t"), &foreign, SOON).await.unwrap();
    assert_eq!(used(&server, "g2").await.2, 1);

    client.delete_volume(&volume("a")).await.unwrap();
    assert_eq!(used(&server, "g1").await.1, 0);
    client.delete_snapshot(&snapshot("s")).await.unwrap();
    assert_eq!(used(&server, "g1").await, (0, 0, 0));
    client.put_volume(&volume("b"), &of_guest(10 * MIB, "iron"), SOON).await.unwrap();
    client.delete_budget(&account("g1")).await.unwrap();
    client.put_volume(&volume("c"), &of_guest(4 * MIB, "gold"), SOON).await.unwrap();
}

#[tokio::test]
async fn concurrent_requests_never_exceed_the_budget() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    let limits = BudgetSpec { bytes: Some(5 * MIB), ..BudgetSpec::default() };
    server.client.put_budget(&account("g1"), &limits).await.unwrap();
    let create = |number: u32| {
        let client = server.client.clone();
        async move { client.put_volume(&volume(&format!("v{number}")), &of_guest(MIB, "c"), SOON).await.is_ok() }
    };
    let created = join_all((0..20).map(create)).await;
    assert_eq!(created.iter().filter(|created| **created).count(), 5);
    assert_eq!(used(&server, "g1").await, (5 * MIB, 5, 0));
}

#[tokio::test]
async fn an_owner_is_changed_and_survives_a_restart_as_the_budget_does() {
    let site = Site::reflink();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &of_guest(MIB, "gold"), SOON).await.unwrap();
    let limits = BudgetSpec { volumes: Some(0), ..BudgetSpec::default() };
    server.client.put_budget(&account("g2"), &limits).await.unwrap();
    let owner = Owner { account: account("g2"), class: "iron".into() };
    // No budget refuses it.
    let changed = server.client.put_owner(&volume("v"), &owner).await.unwrap();
    assert_eq!(changed.owner, owner);
    until("the record has the new owner", async || {
        read_record(&site.file(&volume("v"))).is_some_and(|record| record["owner"]["account"] == "g2")
    })
    .await;
    assert_eq!(server.stop(), Some(0));
    let server = site.start();
    let all = server.client.list_budgets().await.unwrap();
    let [budget] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!((&budget.account, &budget.limits), (&account("g2"), &Some(limits)));
    assert_eq!((budget.used.bytes, budget.used.classes["iron"].volumes), (MIB, 1));
    let (status, text) = server.ops("/metrics").await;
    let sample = |name: &str, value: u64| {
        text.contains(&format!("nestor_storage_infra_account_{name}{{account=\"g2\"}} {value}\n"))
    };
    assert_eq!(status, 200);
    assert!(sample("used_bytes", MIB) && sample("volumes", 1) && sample("volumes_limit", 0), "{text}");
    assert!(!text.contains("account_limit_bytes{account=\"g2\"}"), "{text}");
}
