//! What Ceph reports, and what follows from it. Pure.

use std::collections::{BTreeMap, HashMap};

use infra_api::CephPool;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::adopt::UNIT;

/// A client that has an image open for writing.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Watcher {
    /// Address and nonce: one per attached disk.
    pub(super) address: String,
    pub(super) client: u64,
}

/// What tells whether an image can become a volume.
#[derive(Debug, Deserialize)]
pub(super) struct Examined {
    /// Ceph's ID of the image: at most 14 hexadecimal digits, which a rename does not change.
    id: String,
    pub(super) bytes: u64,
    snapshots: Vec<String>,
    /// Locks that somebody took by hand.
    locks: Vec<String>,
    migrates: bool,
}

impl Examined {
    /// The ID as a number.
    pub(super) fn number(&self) -> u64 {
        u64::from_str_radix(&self.id, 16).unwrap_or(0)
    }

    /// Why the image cannot become a volume.
    pub(super) fn refusal(&self) -> Option<String> {
        if let Some(snapshot) = self.snapshots.first() {
            return Some(format!(
                "it has {} snapshots, such as {snapshot}, which would be lost with the volume; remove them with `rbd snap purge`, \
                 or copy the image with `rbd cp`",
                self.snapshots.len()
            ));
        }
        if let Some(lock) = self.locks.first() {
            return Some(format!("it has the lock {lock}; end its holder, and remove it with `rbd lock rm`"));
        }
        if self.migrates {
            return Some("it is being migrated; complete that with `rbd migration commit`".to_owned());
        }
        let is_whole = self.bytes > 0 && self.bytes.is_multiple_of(UNIT);
        (!is_whole).then(|| {
            format!(
                "it has {} bytes, which is not a multiple of {UNIT}; enlarge it with `rbd resize` first",
                self.bytes
            )
        })
    }
}

/// Output of `rbd lock ls`.
#[derive(Debug, Deserialize)]
pub(super) struct Lock {
    pub(super) id: String,
    pub(super) locker: String,
    pub(super) address: String,
}

/// Output of `rbd du`.
#[derive(Debug, Deserialize)]
pub(super) struct DiskUsage {
    images: Vec<ImageUsage>,
}

#[derive(Debug, Deserialize)]
struct ImageUsage {
    name: String,
    used_size: u64,
}

impl DiskUsage {
    /// Allocated bytes by image, with those of its snapshots.
    pub(super) fn by_image(self) -> HashMap<String, u64> {
        let mut used = HashMap::new();
        for one in self.images {
            *used.entry(one.name).or_default() += one.used_size;
        }
        used
    }
}

/// An image in the trash.
#[derive(Debug, Deserialize)]
pub(super) struct Trashed {
    pub(super) id: String,
    pub(super) name: String,
    /// Says until when the image is protected, if it is.
    #[serde(default)]
    status: String,
}

impl Trashed {
    /// Whether the time in the trash is over.
    pub(super) fn is_expired(&self) -> bool {
        self.status.starts_with("expired")
    }
}

/// Space of a Ceph pool, in bytes that clients can store, whatever the number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    /// Number of the Ceph pool.
    pub(super) id: u64,
    pub(super) used: u64,
    pub(super) available: u64,
}

#[derive(Debug, Deserialize)]
struct Usage {
    pools: Vec<PoolUsage>,
}

#[derive(Debug, Deserialize)]
struct PoolUsage {
    name: String,
    id: u64,
    stats: PoolStats,
}

#[derive(Debug, Deserialize)]
struct PoolStats {
    stored: u64,
    max_avail: u64,
}

#[derive(Debug, Deserialize)]
struct PoolDetail {
    pool_name: String,
    size: u32,
    min_size: u32,
    crush_rule: i64,
}

#[derive(Debug, Deserialize)]
struct Rule {
    rule_id: i64,
    steps: Vec<RuleStep>,
}

#[derive(Debug, Deserialize)]
struct RuleStep {
    op: String,
    #[serde(default)]
    item_name: String,
}

#[derive(Debug, Deserialize)]
struct Health {
    checks: BTreeMap<String, Check>,
}

#[derive(Debug, Deserialize)]
struct Check {
    summary: Message,
    #[serde(default)]
    detail: Vec<Message>,
}

#[derive(Debug, Deserialize)]
struct Message {
    message: String,
}

#[derive(Debug, Deserialize)]
struct Fsid {
    fsid: String,
}

/// State of the cluster, as far as a pool depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClusterState {
    /// The cluster's ID.
    pub(super) fsid: String,
    pub(super) space: Space,
    /// Why requests to the pool would wait, if they would.
    pub(super) stalled: Option<String>,
    /// How the pool keeps its data, if the cluster reports it.
    pub(super) kept: Option<CephPool>,
}

/// The command for the monitors that blocks a client for this many seconds.
pub(super) fn block(address: &str, seconds: u64) -> Value {
    json!({"prefix": "osd blocklist", "blocklistop": "add", "addr": address, "expire": seconds as f64})
}

impl ClusterState {
    /// The commands for the monitors whose answers [`Self::parse`] reads.
    pub(super) fn commands() -> [Value; 5] {
        [
            json!({"prefix": "df"}),
            json!({"prefix": "health", "detail": "detail"}),
            json!({"prefix": "fsid"}),
            json!({"prefix": "osd pool ls", "detail": "detail"}),
            json!({"prefix": "osd crush rule dump"}),
        ]
    }

    /// Reads the answers to [`Self::commands`].
    pub(super) fn parse([usage, health, id, pools, rules]: [Value; 5], pool: &str) -> Result<Self, String> {
        let unexpected = |error: serde_json::Error| format!("an answer of Ceph is not as expected: {error}");
        let usage: Usage = serde_json::from_value(usage).map_err(unexpected)?;
        let health: Health = serde_json::from_value(health).map_err(unexpected)?;
        let Fsid { fsid } = serde_json::from_value(id).map_err(unexpected)?;
        let found = usage.pools.iter().find(|one| one.name == pool);
        let found = found.ok_or_else(|| format!("the cluster has no pool {pool}"))?;
        let mut space = Space { id: found.id, used: found.stats.stored, available: found.stats.max_avail };
        if health.is_full(pool) {
            space.available = 0;
        }
        // `kept` is only shown: the pool works without it.
        let kept = kept_by(pool, pools, rules);
        Ok(Self { fsid, stalled: health.stalled(found.id), space, kept })
    }
}

/// How a pool keeps its data, from the output of `osd pool ls detail` and `osd crush rule dump`.
fn kept_by(pool: &str, pools: Value, rules: Value) -> Option<CephPool> {
    let pools: Vec<PoolDetail> = serde_json::from_value(pools).ok()?;
    let rules: Vec<Rule> = serde_json::from_value(rules).ok()?;
    let PoolDetail { size, min_size, crush_rule, .. } =
        pools.into_iter().find(|one| one.pool_name == pool)?;
    let rule = rules.into_iter().find(|rule| rule.rule_id == crush_rule);
    let device_class = rule.and_then(|rule| {
        let takes = rule.steps.iter().filter(|step| step.op == "take");
        // The name of a root for one class is `ROOT~CLASS`.
        let mut classes = takes.filter_map(|step| step.item_name.split_once('~'));
        classes.next().map(|(_, class)| class.to_owned())
    });
    Some(CephPool { replicas: size, min_replicas: min_size, device_class })
}

impl Health {
    /// Whether writes to a pool wait or fail because it is full.
    fn is_full(&self, pool: &str) -> bool {
        let named = |check: &Check| check.detail.iter().any(|one| one.message.contains(&format!("'{pool}'")));
        self.checks.get("POOL_FULL").is_some_and(named) || self.checks.contains_key("OSD_FULL")
    }

    /// Why requests to a pool would wait.
    fn stalled(&self, pool: u64) -> Option<String> {
        let check = self.checks.get("PG_AVAILABILITY")?;
        let group = format!("pg {pool}.");
        let inactive = check.detail.iter().filter(|one| one.message.starts_with(&group)).count();
        (inactive > 0 || check.detail.is_empty()).then(|| check.summary.message.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(checks: &str) -> [Value; 5] {
        let checks: Value = serde_json::from_str(checks).unwrap();
        let usage = json!({"pools": [{"name": "vms", "id": 2, "stats": {"stored": 19, "max_avail": 839}}]});
        [usage, json!({"status": "X", "checks": checks}), json!({"fsid": "f"}), Value::Null, Value::Null]
    }

    fn state(checks: &str) -> ClusterState {
        ClusterState::parse(answers(checks), "vms").unwrap()
    }

    #[test]
    fn a_healthy_cluster_has_the_space_of_the_pool() {
        let expected = Space { id: 2, used: 19, available: 839 };
        assert_eq!(
            state("{}"),
            ClusterState { fsid: "f".into(), space: expected, stalled: None, kept: None }
        );
    }

    #[test]
    fn replicas_and_the_class_of_the_rule_are_those_of_the_pool() {
        let pools = json!([
            {"pool_name": "other", "size": 1, "min_size": 1, "crush_rule": 0},
            {"pool_name": "vms", "size": 3, "min_size": 2, "crush_rule": 4},
        ]);
        let rules = |root: &str| {
            json!([
                {"rule_id": 0, "steps": [{"op": "take", "item_name": "x~hdd"}]},
                {"rule_id": 4, "steps": [{"op": "take", "item_name": root}, {"op": "emit"}]},
            ])
        };
        let kept = |root: &str| kept_by("vms", pools.clone(), rules(root)).unwrap();
        let expected = |class: Option<&str>| CephPool {
            replicas: 3,
            min_replicas: 2,
            device_class: class.map(str::to_owned),
        };
        assert_eq!(kept("default~ssd"), expected(Some("ssd")));
        assert_eq!(kept("default"), expected(None));
    }

    #[test]
    fn a_pool_with_inactive_placement_groups_is_stalled() {
        let check = |group: &str| {
            format!(
                r#"{{"PG_AVAILABILITY":{{"summary":{{"message":"Reduced data availability"}},
                "detail":[{{"message":"pg {group} is stuck peering"}}]}}}}"#
            )
        };
        assert!(state(&check("2.1a")).stalled.unwrap().contains("Reduced data"));
        assert_eq!(state(&check("21.a")).stalled, None);
    }

    #[test]
    fn a_full_pool_has_no_space() {
        let check = |pool: &str| {
            format!(
                r#"{{"POOL_FULL":{{"summary":{{"message":"1 pool full"}},"detail":[{{"message":"pool '{pool}' is full"}}]}}}}"#
            )
        };
        assert_eq!(state(&check("vms")).space.available, 0);
        assert_eq!(state(&check("other")).space.available, 839);
        assert_eq!(state(r#"{"OSD_FULL":{"summary":{"message":"1 full osd"}}}"#).space.available, 0);
    }

    #[test]
    fn answers_that_cannot_be_read_or_have_no_such_pool_are_refused() {
        let refused = |answers, pool| ClusterState::parse(answers, pool).unwrap_err();
        assert!(refused(answers("{}"), "none").contains("no pool none"));
        let [usage, _, id, pools, rules] = answers("{}");
        let without_checks = [usage, json!({}), id, pools, rules];
        assert!(refused(without_checks, "vms").contains("not as expected: missing field `checks`"));
    }

    #[test]
    fn usage_counts_snapshots_with_their_image() {
        let text = r#"{"images":[{"name":"v","snapshot":"s","used_size":4},{"name":"v","used_size":8}]}"#;
        let usage: DiskUsage = serde_json::from_str(text).unwrap();
        assert_eq!(usage.by_image(), HashMap::from([("v".to_owned(), 12)]));
    }

    #[test]
    fn an_image_with_snapshots_locks_or_half_blocks_cannot_become_a_volume() {
        let of = |id: &str, bytes: u64, snapshots: &[&str], locks: &[&str], migrates: bool| -> Examined {
            let text = json!({"id": id, "bytes": bytes, "snapshots": snapshots, "locks": locks, "migrates": migrates});
            serde_json::from_value(text).unwrap()
        };
        let plain = of("10226b8b4567ff", 8192, &[], &[], false);
        assert_eq!((plain.number(), plain.refusal()), (0x0010_226b_8b45_67ff, None));
        let why = |image: Examined| image.refusal().unwrap();
        assert!(why(of("1", 8192, &["s"], &[], false)).contains("1 snapshots, such as s"));
        assert!(why(of("1", 8192, &[], &["mine"], false)).contains("the lock mine"));
        assert!(why(of("1", 8192, &[], &[], true)).contains("migrated"));
        assert!(why(of("1", 8191, &[], &[], false)).contains("8191 bytes"));
        assert!(why(of("1", 0, &[], &[], false)).contains("0 bytes"));
    }

    #[test]
    fn an_image_in_the_trash_is_protected_until_its_time_is_over() {
        let of = |status: &str| Trashed { id: "1".into(), name: "v".into(), status: status.into() };
        assert!(!of("protected until Fri Nov 27 02:27:54 2026").is_expired());
        assert!(of("expired at Fri Nov 27 02:27:54 2026").is_expired() && !of("").is_expired());
    }
}
