//! Random UUIDs.

use uuid::Uuid;

/// A random UUID. In a simulation it follows from the seed.
pub(crate) fn uuid() -> Uuid {
    #[cfg(test)]
    if let (Some(high), Some(low)) = (seeded_random::next(), seeded_random::next()) {
        let bytes = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        return uuid::Builder::from_random_bytes(bytes).into_uuid();
    }
    Uuid::new_v4()
}
