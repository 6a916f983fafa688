//! Mutations of inputs.

use std::ops::Range;

use fastrand::Rng;

/// Maximum number of edits of one input.
const MAX_EDITS: usize = 4;
/// Maximum length of an input in bytes.
const MAX_LENGTH: usize = 16 << 10;

/// Texts that parsers treat in a special way.
const TOKENS: [&[u8]; 24] = [
    b"0",
    b"-1",
    b"9223372036854775808",
    b"18446744073709551616",
    b"1e999",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b"\"\"",
    b"..",
    b"../",
    b"/",
    b"\0",
    b"\n",
    b"\r\n",
    b"\\u0000",
    b"\x1b[2J",
    b"\xff",
    "\u{2028}".as_bytes(),
    "\u{202e}".as_bytes(),
    "\u{fdfa}".as_bytes(),
    b"&#10;",
    b"',\"=:;",
];

/// A kept input with a few random edits.
pub(crate) fn mutated(rng: &mut Rng, kept: &[Vec<u8>]) -> Vec<u8> {
    let mut input = pick(rng, kept).to_vec();
    for _ in 0..rng.usize(1..=MAX_EDITS) {
        edit(rng, &mut input, kept);
    }
    input.truncate(MAX_LENGTH);
    input
}

fn edit(rng: &mut Rng, input: &mut Vec<u8>, kept: &[Vec<u8>]) {
    let cut = range(rng, input.len());
    let at = cut.start;
    match rng.u8(0..7) {
        0 if !input.is_empty() => input[at.min(cut.end.saturating_sub(1))] ^= 1 << rng.u8(0..8),
        1 => input.insert(at, rng.u8(..)),
        2 => drop(input.drain(cut)),
        3 => {
            let part = input[cut].to_vec();
            insert(input, at, &part);
        }
        4 => insert(input, at, &pick(rng, &TOKENS).repeat(1 << rng.u8(0..9))),
        5 => drop(input.splice(cut, pick(rng, &TOKENS).iter().copied())),
        _ => {
            let other = pick(rng, kept);
            drop(input.splice(cut, other[range(rng, other.len())].iter().copied()));
        }
    }
}

fn insert(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    drop(input.splice(at..at, bytes.iter().copied()));
}

fn pick<'a, T: AsRef<[u8]>>(rng: &mut Rng, inputs: &'a [T]) -> &'a [u8] {
    inputs[rng.usize(..inputs.len())].as_ref()
}

/// A short part of an input.
fn range(rng: &mut Rng, length: usize) -> Range<usize> {
    let start = rng.usize(..=length);
    start..length.min(start + rng.usize(..32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_the_same_in_every_run_and_limited() {
        let kept = [Vec::new(), b"abc".to_vec(), vec![7; MAX_LENGTH]];
        let inputs = || {
            let mut rng = Rng::with_seed(1);
            (0..500).map(|_| mutated(&mut rng, &kept)).collect::<Vec<_>>()
        };
        assert_eq!(inputs(), inputs());
        assert!(inputs().iter().all(|input| input.len() <= MAX_LENGTH));
    }
}
