//! Plots of bench results, for the docs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use plotters::coord::ranged1d::{IntoSegmentedCoord, SegmentValue};
use plotters::prelude::*;

use crate::report::{self, Row};

/// Width and height, in pixels.
const SIZE: (u32, u32) = (800, 420);
const NESTOR: RGBColor = RGBColor(31, 119, 180);
const FLOOR: RGBColor = RGBColor(170, 170, 170);

/// Draws one plot per bench from the durations in its JSON rows: `<folder>/<bench>.svg`. Returns the files.
pub fn draw(rows: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let entries = std::fs::read_dir(rows)
        .with_context(|| format!("no results at {}: run a bench first", rows.display()))?;
    let mut drawn = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let rows = report::read(&path)?;
        let times: Vec<Row> = rows.into_iter().filter(|row| row.unit == "ms").collect();
        if times.is_empty() {
            continue;
        }
        let file = folder.join(path.file_name().unwrap_or_default()).with_extension("svg");
        plot(&file, &times).map_err(|error| anyhow!("cannot draw {}: {error}", file.display()))?;
        drawn.push(file);
    }
    drawn.sort();
    Ok(drawn)
}

/// Draws bars for each case on a logarithmic scale: the median, the floor's median beside it, and a line to the maximum.
fn plot(file: &Path, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let labels: Vec<String> = rows.iter().map(label).collect();
    let all = rows.iter().flat_map(|row| [Some(row.p50), Some(row.max), row.floor_p50]).flatten();
    let (low, high) = all.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
    let low = (low / 2.0).max(0.1);
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{}: median, floor's median, slowest", rows[0].bench), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d((0..rows.len()).into_segmented(), (low..high * 1.5).log_scale())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .y_desc("milliseconds")
        .x_labels(rows.len())
        .x_label_formatter(&|value| match value {
            SegmentValue::CenterOf(index) => labels.get(*index).cloned().unwrap_or_default(),
            _ => String::new(),
        })
        .draw()?;
    // The axis has one more segment than there are rows.
    let segments = u32::try_from(rows.len() + 1).unwrap_or(u32::MAX);
    let half = chart.plotting_area().dim_in_pixel().0 / segments / 2;
    for (index, row) in rows.iter().enumerate() {
        let place = |value: f64| (SegmentValue::CenterOf(index), value);
        let bar = |value: f64, color: &RGBColor, left: u32, right: u32| {
            let mut bar = Rectangle::new(
                [(SegmentValue::Exact(index), low), (SegmentValue::Exact(index + 1), value)],
                color.filled(),
            );
            bar.set_margin(0, 0, left, right);
            bar
        };
        let gap = half / 5;
        chart.draw_series([bar(row.p50, &NESTOR, gap, half)])?;
        if let Some(floor) = row.floor_p50 {
            chart.draw_series([bar(floor, &FLOOR, half, gap)])?;
        }
        chart.draw_series(LineSeries::new([place(row.p50), place(row.max)], &BLACK))?;
    }
    root.present()?;
    Ok(())
}

fn label(row: &Row) -> String {
    match row.metric.as_str() {
        "duration" => row.case.clone(),
        metric => format!("{}, {metric}", row.case),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_drawn_and_other_rows_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let row = |case: &str, unit: &str, floor: Option<f64>| Row {
            bench: "create".into(),
            case: case.into(),
            metric: "duration".into(),
            unit: unit.into(),
            n: 20,
            p50: 30.0,
            p90: 40.0,
            p99: 50.0,
            max: 60.0,
            floor_p50: floor,
            ratio_p50: None,
        };
        let rows = [row("one", "ms", Some(20.0)), row("burst30", "ms", None), row("one", "MiB", None)];
        std::fs::write(folder.path().join("create.json"), serde_json::to_vec(&rows).unwrap()).unwrap();
        std::fs::write(folder.path().join("memory.json"), serde_json::to_vec(&rows[2..]).unwrap()).unwrap();
        let drawn = draw(folder.path(), &folder.path().join("plots")).unwrap();
        assert_eq!(drawn, [folder.path().join("plots/create.svg")]);
        let picture = std::fs::read_to_string(&drawn[0]).unwrap();
        assert!(["<svg", "burst30", "milliseconds"].iter().all(|text| picture.contains(text)), "{picture}");
        assert!(!picture.contains("width=\"-"), "a bar has no width: {picture}");
    }
}
