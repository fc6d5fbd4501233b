//! The sections of the page with tables.

use super::sections::group_plot;
use super::svg::cell_bars;
use crate::{BATCH_SIZES, BatchFigures, ColumnReport, Figures, GroupReport, MIDDLE, Report};
use onefold_base::units::format_count;
use onefold_page::text::{escape, number, percent};
use onefold_page::{legend, section};

/// Returns the table of repeat probabilities and dedupe factors by group and feature.
pub(super) fn groups(report: &Report) -> String {
    let sizes = BATCH_SIZES.map(|size| format!("<th>{}</th>", format_count(size as u64)));
    let first = |class: &str| sizes.concat().replacen("<th>", &format!("<th class=\"{class}\">"), 1);
    let head = format!(
        "<thead><tr><th rowspan=\"2\">group, feature</th><th rowspan=\"2\">ids per<br>sample</th><th rowspan=\"2\">repeats<br>(d)</th>\
         <th rowspan=\"2\">predicted</th><th class=\"over edge\">arrival</th><th class=\"over edge\" colspan=\"{n}\">exact, batches of</th>\
         <th class=\"over edge\" colspan=\"{n}\">with windows, batches of</th></tr>\n<tr><th class=\"edge\">{}</th>{}{}</tr></thead>",
        format_count(BATCH_SIZES[MIDDLE] as u64),
        first("edge"),
        first("edge"),
        n = BATCH_SIZES.len(),
    );
    let mut sorted: Vec<&GroupReport> = report.groups.iter().collect();
    sorted.sort_by(|a, b| b.figures.ids_per_sample.total_cmp(&a.figures.ids_per_sample));
    let rows: String = sorted.into_iter().map(group_rows).collect();
    let lead = "How often a list is that of the session's sample before (d), and how many times fewer ids that leaves: predicted \
                from d and the samples per session, and measured over all batches of this dataset, before clustering and after. The \
                larger the batch, the more of each session it holds. Of groups that are not deduplicated, the figures tell what \
                would be saved.";
    let content = format!(
        "{}<div class=\"scroll\"><table>{head}<tbody>\n{rows}</tbody></table></div>",
        group_plot(report)
    );
    section("What repeats", lead, &content)
}

fn group_rows(group: &GroupReport) -> String {
    let note = match (group.deduplicated, group.features.len()) {
        (false, _) => "<span class=\"note\">not deduplicated</span>".to_owned(),
        (true, 1) => format!("<span class=\"note\">{}</span>", escape(&group.features[0].name)),
        (true, features) => format!("<span class=\"note\">{features} features</span>"),
    };
    let mut rows = format!(
        "<tr class=\"group\">{}{}</tr>\n",
        name_cell("", &group.name, &note),
        figure_cells(&group.figures)
    );
    if group.features.len() > 1 || !group.deduplicated {
        for feature in &group.features {
            let cells = figure_cells(&feature.figures);
            rows.push_str(&format!("<tr>{}{cells}</tr>\n", name_cell("member", &feature.name, "")));
        }
    }
    rows
}

/// Returns the cell of a name. A long name is truncated, and a tooltip shows it in full. `note` is HTML.
fn name_cell(class: &str, name: &str, note: &str) -> String {
    let name = escape(name);
    format!("<td class=\"{class}\" title=\"{name}\">{name}{note}</td>")
}

fn figure_cells(figures: &Figures) -> String {
    let middle = &figures.batches[MIDDLE];
    let mut cells = format!(
        "<td>{}</td><td>{}</td><td>{}</td><td class=\"edge\">{}</td>",
        number(figures.ids_per_sample),
        figures.repeat_probability.map_or_else(|| "–".to_owned(), percent),
        number(figures.predicted_dedupe_factor),
        middle.arrival_dedupe_factor.map_or_else(|| "–".to_owned(), number),
    );
    for of in [|b: &BatchFigures| b.dedupe_factor, |b: &BatchFigures| b.partial_dedupe_factor] {
        for (i, batch) in figures.batches.iter().enumerate() {
            let edge = if i == 0 { " class=\"edge\"" } else { "" };
            cells.push_str(&format!("<td{edge}>{}</td>", number(of(batch))));
        }
    }
    cells
}

/// Returns the table of bytes by column and layout.
pub(super) fn columns(report: &Report) -> String {
    let columns = &report.storage.columns;
    let bytes = |column: &ColumnReport| {
        [column.arrival_bytes_per_sample, column.rows_bytes_per_sample, column.folded_bytes_per_sample]
    };
    let largest = columns.iter().flat_map(bytes).fold(0.0, f64::max);
    let row = |column: &ColumnReport| {
        let values: Vec<(f64, &str)> = bytes(column).into_iter().zip(["arrival", "rows", "folded"]).collect();
        let cells: String =
            bytes(column).iter().map(|bytes| format!("<td>{}</td>", number(*bytes))).collect();
        let ids = column.ids.map_or_else(
            || "<td class=\"edge\"></td><td></td><td></td><td></td>".to_owned(),
            |ids| {
                format!(
                    "<td class=\"edge\">{}</td><td>{}</td><td>{}</td><td>{}</td>",
                    number(ids.stored_ids_per_sample),
                    format_count(ids.distinct_ids),
                    number(ids.bytes_per_stored_id),
                    number(ids.entropy_bytes_per_stored_id)
                )
            },
        );
        format!(
            "<tr>{}<td class=\"bars\">{}</td>{cells}{ids}</tr>\n",
            name_cell("", &column.name, ""),
            cell_bars(&values, largest)
        )
    };
    let rows: String = columns.iter().map(row).collect();
    let storage = &report.storage;
    let total = format!(
        "<tr class=\"group\"><td>all columns</td><td></td><td>{}</td><td>{}</td><td>{}</td><td class=\"edge\"></td><td></td><td></td><td></td></tr>\n",
        number(storage.arrival_bytes_per_sample),
        number(storage.rows_bytes_per_sample),
        number(storage.folded_bytes_per_sample)
    );
    let head = "<thead><tr><th rowspan=\"2\">column</th><th class=\"over\" colspan=\"4\">bytes per sample</th>\
                <th class=\"over edge\" colspan=\"4\">ids stored, folded</th></tr>\n<tr><th></th><th>arrival</th><th>clustered</th>\
                <th>folded</th><th class=\"edge\">per sample</th><th>distinct</th><th>bytes per id</th><th>entropy, bytes</th></tr></thead>";
    let lead = "What each column takes on disk, compressed, in each way of storing it; the largest first. The last two figures tell how \
                well the ids that are left are encoded: the bytes that one takes, beside the entropy of their distribution.";
    let legend = legend(&[
        ("arrival", "arrival order, rows"),
        ("rows", "clustered, rows"),
        ("folded", "clustered, folded"),
    ]);
    let content =
        format!("{legend}<div class=\"scroll\"><table>{head}<tbody>\n{total}{rows}</tbody></table></div>");
    section("Bytes by column", lead, &content)
}
