//! Tables for the output of commands: aligned columns without borders, as kubectl prints them.

use comfy_table::{Table, presets};

/// Spaces to the left and to the right of a column.
const PADDING: (u16, u16) = (0, 2);

/// Formats a header and rows, one line each. Cells are neither wrapped nor cut.
pub fn format(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec()).add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding(PADDING);
    }
    table.trim_fmt() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_spaces() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        assert_eq!(
            format(&["NAME", "STATE"], [row(["pool-1", "ok"]), row(["ü", ""])]),
            "NAME    STATE\npool-1  ok\nü\n"
        );
        assert_eq!(format(&["NAME", "STATE"], []), "NAME  STATE\n");
    }
}
