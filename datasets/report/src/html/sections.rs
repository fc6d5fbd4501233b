//! The sections of the page with plots.

use super::svg::{Factors, factors, heat_map, histogram};
use crate::{MIDDLE, Report, SizeBucket, TrainingFigures};
use onefold_base::units::format_count;
use onefold_page::svg::{Bar, Line, bars, lines};
use onefold_page::text::{number, one_in, percent, times};
use onefold_page::{legend, section};

/// The number of groups that are drawn. The table contains all groups.
const DRAWN_GROUPS: usize = 24;

/// Returns the section about the savings by clustering and folding.
pub(super) fn bought(report: &Report) -> String {
    let (storage, all) = (&report.storage, &report.all[MIDDLE]);
    let smaller = |bytes: f64| match storage.arrival_bytes_per_sample / bytes {
        factor if factor >= 1.005 => format!("{} B, {} smaller", number(bytes), times(factor)),
        _ => format!("{} B", number(bytes)),
    };
    let bar = |label: &str, value, text, class| Bar {
        label: label.to_owned(),
        parts: vec![(class, value)],
        text,
        limit: None,
    };
    let sizes = [
        bar(
            "arrival",
            storage.arrival_bytes_per_sample,
            smaller(storage.arrival_bytes_per_sample),
            "arrival",
        ),
        bar("clustered", storage.rows_bytes_per_sample, smaller(storage.rows_bytes_per_sample), "rows"),
        bar("folded", storage.folded_bytes_per_sample, smaller(storage.folded_bytes_per_sample), "folded"),
    ];
    let mut ids = Vec::new();
    if let Some(factor) = all.arrival_dedupe_factor {
        ids.push(bar("arrival", factor, times(factor), "arrival"));
    }
    ids.push(bar("clustered", all.dedupe_factor, times(all.dedupe_factor), "rows"));
    let windows = all.partial_dedupe_factor;
    ids.push(bar("with windows", windows, times(windows), "folded"));
    let content = format!(
        "<div class=\"pair\"><figure><h3>Bytes per sample on disk</h3>{}</figure>\
         <figure><h3>Dedupe factor in batches of {}</h3>{}</figure></div>",
        bars("bytes per sample on disk, by order and layout", &sizes, 100.0),
        format_count(all.batch_size as u64),
        bars("dedupe factor, by order", &ids, 110.0),
    );
    let lead = "Clustering puts the samples of a session side by side, so that compression and batches meet the same lists \
                again; folding stores a list only where it changes, and of a sliding window only what is new. Left: the same \
                kind of samples, written to Parquet with zstd in each way. Right: ids of all samples of a batch for each id \
                that is left when every distinct row is kept once, and when windows share their ids too.";
    section("What clustering bought", lead, &content)
}

/// Returns the section about the number of samples per session.
pub(super) fn sessions(report: &Report) -> String {
    let sizes = &report.samples_per_session;
    let name = |bucket: &SizeBucket| match bucket.to {
        None => format!("{}+", bucket.from),
        Some(to) if to == bucket.from => to.to_string(),
        Some(to) => format!("{}–{to}", bucket.from),
    };
    let columns: Vec<(String, u64)> =
        sizes.histogram.iter().map(|bucket| (name(bucket), bucket.sessions)).collect();
    let width = sizes.histogram.first().map_or(1, |first| first.to.unwrap_or(1)) as f64;
    // A mark is in the middle of its whole number within the column.
    let place = |size: f64| ((size - 1.0) / width + 0.5 / width).min(columns.len() as f64 - 0.5);
    let marks = [
        (place(sizes.median as f64), format!("median {}", format_count(sizes.median))),
        (place(sizes.mean), format!("mean {}", number(sizes.mean))),
        (place(sizes.p99 as f64), format!("99 % up to {}", format_count(sizes.p99))),
    ];
    let plot = histogram("sessions by their number of samples", "samples in the session", &columns, &marks);
    let lead = format!(
        "The more samples a session has, the more often its lists can repeat. How many sessions (vertical) have how many \
         samples (horizontal); the longest of {} sessions has {} samples.",
        format_count(sizes.sessions),
        format_count(sizes.max)
    );
    section("Samples per session", &lead, &format!("<figure>{plot}</figure>"))
}

/// Returns a plot of the deduplicated groups, ordered by the number of ids, the largest first.
pub(super) fn group_plot(report: &Report) -> String {
    let mut groups: Vec<_> = report.groups.iter().filter(|group| group.deduplicated).collect();
    groups.sort_by(|a, b| b.figures.ids_per_sample.total_cmp(&a.figures.ids_per_sample));
    if groups.is_empty() {
        return String::new();
    }
    let drawn: Vec<Factors> = groups
        .iter()
        .take(DRAWN_GROUPS)
        .map(|group| Factors {
            name: &group.name,
            exact: group.figures.batches[MIDDLE].dedupe_factor,
            partial: group.figures.batches[MIDDLE].partial_dedupe_factor,
            predicted: group.figures.predicted_dedupe_factor,
        })
        .collect();
    let more = match groups.len() - drawn.len() {
        0 => String::new(),
        more => format!(" The {more} groups with fewer ids are in the table only."),
    };
    format!(
        "<figure>{}{}</figure><p class=\"facts\">Groups that are deduplicated, those with the most ids first; batches of {}.{more}</p>",
        factors("dedupe factor by feature group", &drawn),
        legend(&[
            ("rows", "measured, every distinct row once"),
            ("folded", "measured, windows share their ids"),
            ("mark", "predicted from d and S"),
        ]),
        format_count(report.all[MIDDLE].batch_size as u64)
    )
}

/// Returns the section about features that change together.
pub(super) fn co_change(report: &Report) -> String {
    let co_change = &report.co_change;
    if co_change.features.is_empty() {
        return String::new();
    }
    let group_of = |name: &String| {
        report.groups.iter().position(|group| group.features.iter().any(|feature| feature.name == *name))
    };
    let groups: Vec<_> = co_change.features.iter().map(group_of).collect();
    let starts: Vec<usize> = (1..groups.len()).filter(|i| groups[*i] != groups[i - 1]).collect();
    let plot = heat_map("which features change together", &co_change.features, &co_change.share, &starts);
    let all: usize = report.groups.iter().map(|group| group.features.len()).sum();
    let shown = match all - co_change.features.len() {
        0 => String::new(),
        less => format!(" The {less} features that take least space are left out."),
    };
    let lead = format!(
        "Features that change in the same samples belong in one group: they then share one inverse index. Of the samples \
         where the feature of a row changes within its session, the share where the feature of the column changes too, from \
         none (pale) to all (full colour); a grey row never changes. Lines part the groups that the dataset has.{shown}"
    );
    section("Which features change together", &lead, &format!("<figure>{plot}</figure>"))
}

/// Returns the section about the effect on training.
pub(super) fn training(report: &Report) -> String {
    let training = &report.training[MIDDLE];
    let row = |what: &str, of: fn(&TrainingFigures) -> f64| {
        let (off, exact, window) = (of(&training.off), of(&training.exact), of(&training.window));
        let less = |value: f64| if value > 0.0 { times(off / value) } else { "–".to_owned() };
        format!(
            "<tr><td>{what}</td><td>{}</td><td class=\"edge\">{}</td><td>{}</td><td class=\"edge\">{}</td><td>{}</td></tr>\n",
            number(off),
            number(exact),
            less(exact),
            number(window),
            less(window)
        )
    };
    let rows = [
        row("Ids looked up", |figures| figures.lookups_per_sample),
        row("Rows pooled or attended to", |figures| figures.rows_per_sample),
        row("Bytes to the device", |figures| figures.bytes_to_device_per_sample),
    ];
    let table = format!(
        "<div class=\"scroll plain\"><table><thead><tr><th>Per sample, batches of {}</th><th>as plain lists</th>\
         <th class=\"edge\">exact</th><th>less</th><th class=\"edge\">with windows</th><th>less</th></tr></thead><tbody>\n{}</tbody></table></div>",
        format_count(training.batch_size as u64),
        rows.concat()
    );
    let points = |of: fn((f64, f64)) -> f64| -> Vec<(f64, f64)> {
        (0..=50)
            .map(|i| f64::from(i) / 50.0)
            .map(|share| (share, of(training.speed_up_bounds(share))))
            .collect()
    };
    let curves = [
        Line { name: "with windows", class: "folded", points: points(|(_, window)| window) },
        Line { name: "exact", class: "rows", points: points(|(exact, _)| exact) },
    ];
    let plot = lines(
        "bound on the speed-up of a training step",
        ("share of a step's time that goes with ids", "times faster, at most"),
        &curves,
    );
    let bounds = [0.5, 0.8, 0.9, 0.95].map(|share| {
        let (exact, window) = training.speed_up_bounds(share);
        format!("<tr><td>{}</td><td>{}</td><td>{}</td></tr>\n", percent(share), times(exact), times(window))
    });
    let bounds = format!(
        "<div class=\"scroll plain\"><table><thead><tr><th>share of the step (p)</th><th>exact</th><th>with windows</th></tr></thead>\
         <tbody>\n{}</tbody></table></div>",
        bounds.concat()
    );
    let note = "These are bounds, not measurements of a trainer. By Amdahl's law, if a share p of a step's time goes with the \
                ids that are looked up, moved and pooled, and those become F times fewer, the step becomes at most \
                <code>1 / ((1 − p) + p / F)</code> times faster; F is the ratio of ids looked up in the table above. The rest \
                of the step (dense layers, the interaction, whatever runs per sample) stays as it is.";
    let lead = "What one sample costs a trainer that reads this dataset clustered, with the groups that it has: with every \
                list repeated, with each distinct row once, and with windows that share their ids. Measured by counting, for \
                the middle batch size.";
    section(
        "What a trainer can expect",
        lead,
        &format!(
            "{table}<p style=\"margin-top:18px\">{note}</p><div class=\"pair\"><figure>{plot}</figure>{bounds}</div>"
        ),
    )
}

/// Returns the section about the method of measurement.
pub(super) fn method(report: &Report) -> String {
    let storage = &report.storage;
    let clustered = report.order.is_clustered();
    let (read, made) = match clustered {
        true => {
            ("in the dataset's clustered order", "Samples were put back into arrival order for this report.")
        }
        false => ("in the dataset's arrival order", "Samples were clustered for this report."),
    };
    let arrival = match (clustered, report.sampled) {
        (_, Some(share)) => format!(
            "As the dataset is a sample of the sessions, batches and row groups in arrival order are smaller by the same factor \
             ({}): they then span as much time as those of the whole log, and as few samples of a session meet in them.",
            one_in(share)
        ),
        (true, None) => "Samples in arrival order are all those of some stretches of time, spread over the dataset, so that they \
                         interleave as they did when they were logged."
            .to_owned(),
        (false, None) => "Clustered samples are those of whole sessions, chosen by a hash.".to_owned(),
    };
    let entries = [
        (
            "Samples",
            format!(
                "All {} samples were read and counted, {read}. {made} For bytes, {} samples in arrival order and {} clustered ones \
                 were written to Parquet and measured by what the files' footers say. {arrival}",
                format_count(report.samples),
                format_count(storage.arrival_samples),
                format_count(storage.clustered_samples)
            ),
        ),
        (
            "d, and the prediction",
            format!(
                "d is the share of samples, of those that are not the first of their session, whose lists are those of the session's \
                 sample before. With S = {} samples per session, whole sessions in a batch and lists of equal length, exact \
                 deduplication expects <code>1 / (1 − d (S−1) / S)</code>.",
                number(report.samples_per_session.mean)
            ),
        ),
        (
            "Dedupe factor",
            "Batches are consecutive samples. Exact: ids of all samples ÷ ids of distinct rows; in a group a row is distinct where \
             any of its features differs. With windows: ids of all samples ÷ ids of T, to which a list \
             adds only what it has beyond the sample before. Measured factors are above the prediction where lists come back \
             after a change, or are shared by sessions."
                .to_owned(),
        ),
        (
            "Bytes and entropy",
            "A column's bytes include how long its lists are and where they change. The entropy is of order 0: what the best code \
             needs that gives every id its own word and looks at no context, measured on the ids that the folded column stores. \
             Columns may come out below it, because compression does look at context."
                .to_owned(),
        ),
    ];
    let entries = entries.map(|(what, how)| format!("<dt>{what}</dt><dd>{how}</dd>\n"));
    format!("<section>\n<h2>How this was measured</h2>\n<dl>\n{}</dl>\n</section>", entries.concat())
}
