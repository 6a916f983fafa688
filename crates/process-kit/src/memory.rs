//! Memory that is given back: a map that had many entries keeps the room for them until it is told not to.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

/// Below this nothing is worth it.
const SMALL: usize = 64;

/// Called after entries were removed: leaves at most four times the room that is used. That costs as little for each
/// removal as growing does for each insertion.
pub fn give_back<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    if map.capacity() > SMALL && map.len() * 4 < map.capacity() {
        map.shrink_to(map.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_shrank_keeps_little_room() {
        let mut map: HashMap<u32, u32> = (0..10_000).map(|number| (number, number)).collect();
        for number in 0..9_990 {
            map.remove(&number);
            give_back(&mut map);
        }
        assert!(map.len() == 10 && map.capacity() <= 2 * SMALL, "{}", map.capacity());
    }
}
