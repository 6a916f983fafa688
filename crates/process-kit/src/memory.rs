//! Shrinking of maps: a `HashMap` keeps its capacity after entries were removed.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

/// Capacity below which a map is not shrunk.
const MIN_CAPACITY: usize = 64;

/// Shrinks a map to at most four times its length. To be called after removals; its amortized cost is like that of growth on
/// insertion.
pub fn shrink_map<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    if map.capacity() > MIN_CAPACITY && map.len() * 4 < map.capacity() {
        map.shrink_to(map.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_with_few_entries_has_a_small_capacity() {
        let mut map: HashMap<u32, u32> = (0..10_000).map(|number| (number, number)).collect();
        for number in 0..9_990 {
            map.remove(&number);
            shrink_map(&mut map);
        }
        assert!(map.len() == 10 && map.capacity() <= 2 * MIN_CAPACITY, "{}", map.capacity());
    }
}
