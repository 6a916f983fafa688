//! Index of objects by the keys of other objects, maintained by an informer's change handler: when the other object changes,
//! the index yields the objects to reconcile.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use crate::informer::Key;
use process_kit::memory::shrink_map;

/// Members by group key.
#[derive(Debug, Default)]
pub struct Index(RwLock<Groups>);

#[derive(Debug, Default)]
struct Groups {
    /// Sorted. Most groups have one member.
    members: HashMap<Key, Vec<Key>>,
    groups_of: HashMap<Key, Box<[Key]>>,
}

impl Index {
    /// Sets the groups of `member`; replaces its previous groups.
    pub fn put(&self, member: &Key, groups: impl IntoIterator<Item = Key>) {
        let mut new: Vec<Key> = groups.into_iter().collect();
        new.sort_unstable();
        new.dedup();
        let mut index = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let old = index.groups_of.remove(member).unwrap_or_default();
        for left in old.iter().filter(|group| !new.contains(group)) {
            if let Some(members) = index.members.get_mut(left) {
                members.retain(|one| one != member);
                if members.is_empty() {
                    index.members.remove(left);
                }
            }
        }
        for joined in new.iter().filter(|group| !old.contains(group)) {
            let members = index.members.entry(joined.clone()).or_insert_with(|| Vec::with_capacity(1));
            if let Err(at) = members.binary_search(member) {
                members.insert(at, member.clone());
            }
        }
        if !new.is_empty() {
            index.groups_of.insert(member.clone(), new.into());
        }
        let Groups { members, groups_of } = &mut *index;
        shrink_map(members);
        shrink_map(groups_of);
    }

    /// Members of `group`, sorted.
    pub fn members(&self, group: &Key) -> Vec<Key> {
        let index = self.0.read().unwrap_or_else(PoisonError::into_inner);
        index.members.get(group).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_changes_and_leaves_groups() {
        let index = Index::default();
        let (a, b, x) = (Key::cluster("a"), Key::cluster("b"), Key::cluster("x"));
        index.put(&x, Some(a.clone()));
        index.put(&x, Some(a.clone()));
        assert_eq!(index.members(&a), std::slice::from_ref(&x));
        index.put(&x, [a.clone(), b.clone()]);
        assert_eq!(index.members(&a), index.members(&b));
        index.put(&x, Some(b.clone()));
        assert!(index.members(&a).is_empty());
        assert_eq!(index.members(&b), std::slice::from_ref(&x));
        index.put(&x, None);
        assert!(index.members(&b).is_empty());
    }
}
