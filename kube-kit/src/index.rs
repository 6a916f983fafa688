//! Which objects belong to a key of another kind, kept from an informer's changes: a change of the one is
//! a reason to look at the others.

use std::collections::{BTreeSet, HashMap};
use std::sync::{PoisonError, RwLock};

use crate::informer::Key;

/// Members by group. An object is a member of one group at most.
#[derive(Debug, Default)]
pub struct Index(RwLock<Groups>);

#[derive(Debug, Default)]
struct Groups {
    members: HashMap<Key, BTreeSet<Key>>,
    group_of: HashMap<Key, Key>,
}

impl Index {
    /// Puts `member` into `group`, out of the one it was in; None only takes it out.
    pub fn put(&self, member: &Key, group: Option<Key>) {
        let mut groups = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let old = match &group {
            Some(group) => groups.group_of.insert(member.clone(), group.clone()),
            None => groups.group_of.remove(member),
        };
        if old == group {
            return;
        }
        if let Some(old) = old
            && let Some(members) = groups.members.get_mut(&old)
        {
            members.remove(member);
            if members.is_empty() {
                groups.members.remove(&old);
            }
        }
        if let Some(group) = group {
            groups.members.entry(group).or_default().insert(member.clone());
        }
    }

    /// The members of `group`, in order.
    pub fn members(&self, group: &Key) -> Vec<Key> {
        let groups = self.0.read().unwrap_or_else(PoisonError::into_inner);
        groups.members.get(group).map(|members| members.iter().cloned().collect()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_moves_and_leaves() {
        let index = Index::default();
        let (a, b, x) = (Key::cluster("a"), Key::cluster("b"), Key::cluster("x"));
        index.put(&x, Some(a.clone()));
        index.put(&x, Some(a.clone()));
        assert_eq!(index.members(&a), std::slice::from_ref(&x));
        index.put(&x, Some(b.clone()));
        assert!(index.members(&a).is_empty());
        assert_eq!(index.members(&b), std::slice::from_ref(&x));
        index.put(&x, None);
        assert!(index.members(&b).is_empty());
    }
}
