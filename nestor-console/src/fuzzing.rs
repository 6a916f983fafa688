//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

pub use crate::web::fuzzing::console_queries;

#[cfg(test)]
mod tests {
    #[test]
    fn console_queries() {
        fuzz_kit::replay("console_queries", super::console_queries);
    }
}
