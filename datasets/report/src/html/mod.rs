//! A report as one HTML page: it contains no scripts, loads nothing from elsewhere, and follows the reader's choice
//! of a light or dark colour scheme.

mod sections;
mod svg;
mod tables;

use self::sections::{bought, co_change, method, sessions, training};
use self::tables::{columns, groups};
use super::{MIDDLE, Report};
use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_datasets::{Layout, Order};
use onefold_page::text::{escape, number, one_in, times};
use onefold_page::{STYLE, document};

/// The least factor by which fewer bytes or ids count as a gain.
const GAIN: f64 = 1.5;

/// Returns the report as a self-contained HTML page.
pub fn html(report: &Report) -> String {
    let title = match report.sampled {
        None => format!("Dataset {}", report.dataset),
        Some(_) => format!("What {} would gain", report.dataset),
    };
    let title = escape(&title);
    let body = [
        format!("<h1>{title}</h1>\n{}{}", facts(report), estimate(report)),
        format!("<p class=\"verdict\">{}</p>\n{}", verdict(report), tiles(report)),
        bought(report),
        sessions(report),
        groups(report),
        columns(report),
        co_change(report),
        training(report),
        method(report),
        format!("<footer>Made by Onefold {}.</footer>", escape(&report.onefold_version)),
    ];
    document(&title, STYLE, &body)
}

/// Returns a line that describes the dataset.
fn facts(report: &Report) -> String {
    let layout = match report.layout {
        Layout::Rows => "every sample with its lists (<code>rows</code>)",
        Layout::Folded => "lists where they change (<code>folded</code>)",
    };
    let order = match report.order {
        Order::Session => "clustered by session",
        Order::SessionHash => "clustered by session, sessions by hash",
        Order::Arrival => "in order of arrival",
    };
    format!(
        "<p class=\"facts\">{} in {}, {} · {order}, {layout} · samples from {} to {} UTC</p>\n",
        format_bytes(report.bytes_on_disk),
        count_of(report.partitions as u64, "partition"),
        count_of(report.files as u64, "file"),
        instant(report.first_timestamp_micros),
        instant(report.last_timestamp_micros),
    )
}

/// Formats a time as day and minute in UTC.
fn instant(micros: i64) -> String {
    let time = arrow::temporal_conversions::timestamp_us_to_datetime(micros);
    time.map_or_else(|| format!("{micros} µs"), |time| time.to_string().chars().take(16).collect())
}

/// Returns a note about the sampling, if the dataset is a sample.
fn estimate(report: &Report) -> String {
    let Some(share) = report.sampled.filter(|share| *share < 1.0) else { return String::new() };
    format!(
        "<p class=\"estimate\">Estimated from 1 in {} sessions. A session is taken whole or not at all, so what happens \
         within sessions is as in the whole log; counts of samples, sessions and bytes are those of the sample.</p>\n",
        one_in(share)
    )
}

/// Returns the result of the report in one or two sentences.
fn verdict(report: &Report) -> String {
    let (bytes, ids) = (bytes_factor(report), report.all[MIDDLE].partial_dedupe_factor);
    let storage = format!(
        "Stored folded, a sample takes <b>{}</b> bytes where it takes {} as it is logged: <b>{}</b> smaller.",
        number(report.storage.folded_bytes_per_sample),
        number(report.storage.arrival_bytes_per_sample),
        times(bytes),
    );
    let training = format!(
        "In a batch of {} samples a trainer looks up <b>{}</b> fewer ids.",
        format_count(report.all[MIDDLE].batch_size as u64),
        times(ids),
    );
    let worth = match (bytes >= GAIN, ids >= GAIN) {
        (true, true) => "This data repeats itself, on disk and in batches.",
        (true, false) => "This data repeats itself on disk, though hardly in batches.",
        (false, true) => "This data repeats itself in batches, though hardly on disk.",
        (false, false) => "This data repeats itself little: there is not much to gain.",
    };
    format!("{worth} {storage} {training}")
}

/// Returns the factor by which samples take fewer bytes folded than in arrival order.
fn bytes_factor(report: &Report) -> f64 {
    report.storage.arrival_bytes_per_sample / report.storage.folded_bytes_per_sample
}

/// Returns the key figures.
fn tiles(report: &Report) -> String {
    let all = &report.all[MIDDLE];
    let batch = format_count(all.batch_size as u64);
    let ids: f64 = report.groups.iter().map(|group| group.figures.ids_per_sample).sum();
    let features: usize = report.groups.iter().map(|group| group.features.len()).sum();
    let tiles = [
        (format_count(report.samples), format!("samples in {} sessions", format_count(report.sessions))),
        (number(report.samples_per_session.mean), "samples per session on average (S)".to_owned()),
        (number(ids), format!("ids per sample, in {}", count_of(features as u64, "sparse feature"))),
        (number(report.bytes_per_sample), "bytes per sample in this dataset".to_owned()),
        (times(bytes_factor(report)), "smaller than in arrival order, when folded".to_owned()),
        (times(all.dedupe_factor), format!("fewer ids in a batch of {batch} (dedupe factor, exact)")),
        (times(all.partial_dedupe_factor), format!("fewer ids in a batch of {batch}, with windows")),
        (
            all.arrival_dedupe_factor.map_or_else(|| "–".to_owned(), times),
            format!("fewer ids in a batch of {batch} before clustering"),
        ),
    ];
    let tile = |(figure, what): &(String, String)| {
        format!("<div class=\"tile\"><b>{figure}</b><span>{what}</span></div>\n")
    };
    format!("<div class=\"tiles\">\n{}</div>", tiles.iter().map(tile).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_day_and_a_minute() {
        assert_eq!(instant(1_684_703_210_000_000), "2023-05-21 21:06");
    }
}
