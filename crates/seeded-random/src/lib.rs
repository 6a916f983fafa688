//! The standard library orders hash maps by random numbers that it gets once for each thread, from the function `getrandom` of the C
//! library. It calls it through a weak symbol, so that a program can replace it, as this crate does: on a thread with a seed the
//! numbers follow from the seed.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Runs work on a thread of its own whose random numbers follow from a seed.
pub fn on_seeded_thread<T: Send>(seed: u64, work: impl FnOnce() -> T + Send) -> T {
    let seeded = || {
        STATE.set(Some(seed));
        work()
    };
    match std::thread::scope(|threads| threads.spawn(seeded).join()) {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// The next number of this thread's seed; `None` without a seed. The generator is SplitMix64.
pub fn next() -> Option<u64> {
    let state = STATE.get()?.wrapping_add(0x9E37_79B9_7F4A_7C15);
    STATE.set(Some(state));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    Some(mixed ^ (mixed >> 31))
}

/// Replaces the function of the C library.
///
/// # Safety
///
/// As of getrandom(2): the buffer has at least `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> isize {
    let bytes = buffer.cast::<u8>();
    for at in 0..length {
        // The state of a thread that ends is gone.
        let Some(number) = STATE.try_with(|_| next()).ok().flatten() else {
            // SAFETY: the caller's buffer and length, unchanged.
            return unsafe { nix::libc::syscall(nix::libc::SYS_getrandom, buffer, length, flags) } as isize;
        };
        // SAFETY: `at` is less than the length of the caller's buffer.
        unsafe { bytes.add(at).write(number as u8) };
    }
    length as isize
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn order() -> Vec<u32> {
        (0..100).collect::<HashSet<u32>>().into_iter().collect()
    }

    #[test]
    fn the_order_of_hash_maps_follows_from_the_seed() {
        let one = on_seeded_thread(1, order);
        assert_eq!(on_seeded_thread(1, order), one);
        assert_ne!(on_seeded_thread(2, order), one);
    }

    #[test]
    fn a_thread_without_a_seed_has_random_numbers() {
        let random = || std::thread::spawn(order).join().unwrap();
        assert_ne!(random(), random());
        assert_eq!(next(), None);
    }
}
