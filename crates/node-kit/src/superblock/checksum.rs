//! Checksums of superblocks. Each is computed over a few KiB, once per stage, so the simplest form is enough.

use sha2::{Digest, Sha256};

/// CRC-32C (Castagnoli), continued from `crc`, without the final inversion: ext4 stores it so; xfs and btrfs invert it.
pub(super) fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(crc, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    })
}

/// CRC-16 of ext4's group descriptors without metadata checksums.
pub(super) fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(crc, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte), |crc, _| (crc >> 1) ^ (0xa001 & (crc & 1).wrapping_neg()))
    })
}

/// The checksum of a btrfs block, by the number of its type (btrfs(5), "Checksum algorithms"). None for an unknown type.
pub(super) fn btrfs(kind: u16, bytes: &[u8]) -> Option<Vec<u8>> {
    match kind {
        0 => Some((!crc32c(!0, bytes)).to_le_bytes().to_vec()),
        1 => Some(xxh64(bytes).to_le_bytes().to_vec()),
        2 => Some(Sha256::digest(bytes).to_vec()),
        3 => Some(blake2b_256(bytes)),
        _ => None,
    }
}

/// Little-endian numbers of a block.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// XXH64 with seed 0 (xxHash specification) of whole blocks of 32 bytes and up to three further words.
fn xxh64(bytes: &[u8]) -> u64 {
    const P1: u64 = 0x9e37_79b1_85eb_ca87;
    const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
    const P3: u64 = 0x1656_67b1_9e37_79f9;
    const P4: u64 = 0x85eb_ca77_c2b2_ae63;
    let round =
        |lane: u64, word: u64| lane.wrapping_add(word.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1);
    let mut lanes = [P1.wrapping_add(P2), P2, 0, P1.wrapping_neg()];
    let blocks = bytes.chunks_exact(32);
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(words(block)) {
            *lane = round(*lane, word);
        }
    }
    let joined = lanes
        .iter()
        .zip([1, 7, 12, 18])
        .fold(0_u64, |hash, (lane, by)| hash.wrapping_add(lane.rotate_left(by)));
    let merged =
        lanes.iter().fold(joined, |hash, lane| (hash ^ round(0, *lane)).wrapping_mul(P1).wrapping_add(P4));
    let whole = words(rest).fold(merged.wrapping_add(bytes.len() as u64), |hash, word| {
        (hash ^ round(0, word)).rotate_left(27).wrapping_mul(P1).wrapping_add(P4)
    });
    let mixed = (whole ^ whole >> 33).wrapping_mul(P2);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(P3);
    mixed ^ mixed >> 32
}

/// BLAKE2b with 32 bytes of output and no key (RFC 7693).
fn blake2b_256(bytes: &[u8]) -> Vec<u8> {
    const IV: [u64; 8] = [
        0x6a09_e667_f3bc_c908,
        0xbb67_ae85_84ca_a73b,
        0x3c6e_f372_fe94_f82b,
        0xa54f_f53a_5f1d_36f1,
        0x510e_527f_ade6_82d1,
        0x9b05_688c_2b3e_6c1f,
        0x1f83_d9ab_fb41_bd6b,
        0x5be0_cd19_137e_2179,
    ];
    const SIGMA: [[usize; 16]; 10] = [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ];
    /// Columns, then diagonals.
    const QUARTERS: [[usize; 4]; 8] = [
        [0, 4, 8, 12],
        [1, 5, 9, 13],
        [2, 6, 10, 14],
        [3, 7, 11, 15],
        [0, 5, 10, 15],
        [1, 6, 11, 12],
        [2, 7, 8, 13],
        [3, 4, 9, 14],
    ];
    const BLOCK: usize = 128;
    let mut hash = IV;
    hash[0] ^= 0x0101_0020;
    let count = bytes.len().div_ceil(BLOCK).max(1);
    for number in 0..count {
        let part = &bytes[number * BLOCK..bytes.len().min((number + 1) * BLOCK)];
        let mut padded = [0; BLOCK];
        padded[..part.len()].copy_from_slice(part);
        let message: Vec<u64> = words(&padded).collect();
        let mut v = [0; 16];
        v[..8].copy_from_slice(&hash);
        v[8..].copy_from_slice(&IV);
        v[12] ^= (number * BLOCK + part.len()) as u64;
        if number + 1 == count {
            v[14] = !v[14];
        }
        for order in SIGMA.iter().cycle().take(12) {
            for ([a, b, c, d], pair) in QUARTERS.into_iter().zip(order.chunks_exact(2)) {
                for (word, [by_d, by_b]) in pair.iter().zip([[32, 24], [16, 63]]) {
                    v[a] = v[a].wrapping_add(v[b]).wrapping_add(message[*word]);
                    v[d] = (v[d] ^ v[a]).rotate_right(by_d);
                    v[c] = v[c].wrapping_add(v[d]);
                    v[b] = (v[b] ^ v[c]).rotate_right(by_b);
                }
            }
        }
        for (at, word) in hash.iter_mut().enumerate() {
            *word ^= v[at] ^ v[at + 8];
        }
    }
    hash.iter().take(4).flat_map(|word| word.to_le_bytes()).collect()
}
