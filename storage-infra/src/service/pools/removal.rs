//! What keeps a pool from being removed.

use infra_api::{ObjectKind, PoolName, Problem, ProblemCode, VolumeId};

use crate::catalog::{InPool, Tx};
use crate::service::problems::Result;

/// Number of moving volumes that a refusal names.
const NAMED: usize = 5;

/// Fails while the catalog has a volume or snapshot in the pool, also if its deletion was not completed.
pub(super) fn refuse_while_in_use(tx: &Tx<'_>, pool: &PoolName) -> Result<()> {
    let (volumes, snapshots) = (tx.volumes_in_pool(pool)?, tx.snapshots_in_pool(pool)?);
    let moves = tx.moves_with(pool)?;
    let parts: Vec<String> = [held("volume", &volumes), held("snapshot", &snapshots), moving(&moves)]
        .into_iter()
        .flatten()
        .collect();
    if parts.is_empty() {
        return Ok(());
    }
    let detail = format!(
        "the pool {pool} holds {}; cordon the pool, delete them, and retry. Volumes of retained and Released \
         PersistentVolumes count too",
        parts.join(" and ")
    );
    Err(Problem::new(ProblemCode::InUse, detail).about(ObjectKind::Pool, pool).into())
}

/// "files of 2 volumes that are being moved (a, b)".
fn moving(volumes: &[VolumeId]) -> Option<String> {
    let first: Vec<&str> = volumes.iter().take(NAMED).map(VolumeId::as_str).collect();
    let more = if volumes.len() > NAMED { ", …" } else { "" };
    let (count, names) = (volumes.len(), first.join(", "));
    (count > 0).then(|| format!("files of {count} volumes that are being moved ({names}{more})"))
}

/// "12 volumes (a, b, c, d, e, …), 2 of them are being deleted".
fn held(kind: &str, objects: &InPool) -> Option<String> {
    let InPool { count, deleting, first } = objects;
    if *count == 0 {
        return None;
    }
    let plural = if *count == 1 { "" } else { "s" };
    let more = if *count > first.len() as u64 { ", …" } else { "" };
    let unfinished = match *deleting {
        0 => String::new(),
        1 => ", one of which is being deleted".to_owned(),
        many => format!(", {many} of which are being deleted"),
    };
    Some(format!("{count} {kind}{plural} ({}{more}){unfinished}", first.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_counts_the_objects_and_names_some() {
        let of = |count, deleting, first: &[&str]| InPool {
            count,
            deleting,
            first: first.iter().map(|id| (*id).to_owned()).collect(),
        };
        assert_eq!(held("volume", &InPool::default()), None);
        assert_eq!(held("volume", &of(1, 0, &["a"])).unwrap(), "1 volume (a)");
        let text = held("snapshot", &of(7, 2, &["a", "b"])).unwrap();
        assert_eq!(text, "7 snapshots (a, b, …), 2 of which are being deleted");
        assert_eq!(moving(&[]), None);
        let volumes: Vec<VolumeId> = ('a'..='f').map(|id| VolumeId::new(id.to_string()).unwrap()).collect();
        assert_eq!(moving(&volumes).unwrap(), "files of 6 volumes that are being moved (a, b, c, d, e, …)");
    }
}
