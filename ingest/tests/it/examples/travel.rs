//! `travel.toml`: searches with lists of hotels.

use std::collections::BTreeMap;

use super::{Numbers, Random, Sample, add_days, build, check, fails};
use crate::logs::Dir;

const EXAMPLE: &str = include_str!("../../../examples/travel.toml");
/// 2024-03-05T00:00Z in seconds since 1970.
const DAY: i64 = 1_709_596_800;
const HEADER: &str = "search_id,user_id,session_id,searched_at,platform,destination,filters,hotels,prices,clicked_hotel,clicked_at\n";
const PLATFORMS: [&str; 3] = ["web", "app", "tablet"];
const DESTINATIONS: [&str; 5] = ["Porto, Portugal", "Århus", "Lake \"Como\", Italy", "Oslo", "Kyoto"];
const FILTERS: [&str; 4] = ["pool", "wifi", "5 stars", "pets"];

/// A row of the log; times are in seconds since 1970.
struct Search {
    id: String,
    user: String,
    session: String,
    at: i64,
    platform: &'static str,
    destination: &'static str,
    filters: Vec<&'static str>,
    /// The hotels shown, with their prices.
    hotels: Vec<(String, f64)>,
    /// The hotel that was clicked, and the time of the click.
    click: Option<(String, i64)>,
}

impl Search {
    fn line(&self) -> String {
        let hotels: Vec<&str> = self.hotels.iter().map(|(hotel, _)| &**hotel).collect();
        let prices: Vec<String> = self.hotels.iter().map(|(_, price)| price.to_string()).collect();
        let (clicked, clicked_at) =
            self.click.as_ref().map_or_else(Default::default, |(hotel, at)| (hotel.clone(), at.to_string()));
        let values = [
            self.id.clone(),
            self.user.clone(),
            self.session.clone(),
            self.at.to_string(),
            self.platform.to_owned(),
            format!("\"{}\"", self.destination.replace('"', "\"\"")),
            self.filters.join("|"),
            hotels.join("|"),
            prices.join("|"),
            clicked,
            clicked_at,
        ];
        values.join(",") + "\n"
    }
}

/// Returns two days of searches. Sessions last beyond midnight, change the platform, and overlap with other sessions of
/// their user. Some searches show nothing, and some clicks come after the next search.
fn searches() -> Vec<Search> {
    let mut random = Random(1);
    let mut all = Vec::new();
    for user in 0..24 {
        for visit in 0..1 + random.below(4) {
            let at = DAY + random.below(2 * 86_400 - 4000);
            let mut at = if user % 6 == 0 && visit == 0 { DAY + 86_400 - 200 } else { at };
            let mut platform = PLATFORMS[random.below(3) as usize];
            for _ in 0..1 + random.below(5) {
                let mut hotels: Vec<(String, f64)> = Vec::new();
                for _ in 0..random.below(9) {
                    let hotel = match random.percent(3) {
                        true => format!("h-{}", 1000 + random.below(100)),
                        false => format!("h-{}", random.below(9) * random.below(14)),
                    };
                    if hotels.iter().all(|(other, _)| *other != hotel) {
                        hotels.push((hotel, 40.0 + random.below(600) as f64 / 4.0));
                    }
                }
                let clicked = (!hotels.is_empty() && random.percent(60))
                    .then(|| hotels[random.below(hotels.len() as u64) as usize].0.clone());
                all.push(Search {
                    id: format!("q-{}", all.len()),
                    user: format!("u-{user}"),
                    session: format!("s-{user}/{visit}"),
                    at,
                    platform,
                    destination: match all.len() % 60 {
                        50 => "Nuuk, Greenland",
                        _ => DESTINATIONS[(random.below(4) * random.below(3) % 5) as usize],
                    },
                    filters: FILTERS.into_iter().filter(|_| random.percent(30)).collect(),
                    click: clicked.map(|hotel| (hotel, at + 5 + random.below(400))),
                    hotels,
                });
                at += 30 + random.below(600);
                if random.percent(10) {
                    platform = PLATFORMS[random.below(3) as usize];
                }
            }
        }
    }
    all
}

/// Writes a file per day. Every ninth search is delivered again in the last file.
fn write_log(dir: &Dir, searches: &[Search]) {
    let mut files: BTreeMap<i64, String> = BTreeMap::new();
    for search in searches {
        files.entry((search.at - DAY) / 86_400).or_insert_with(|| HEADER.to_owned()).push_str(&search.line());
    }
    let again = searches.iter().step_by(9).map(Search::line);
    files.last_entry().unwrap().get_mut().extend(again);
    assert_eq!(files.len(), 2);
    for (day, text) in files {
        dir.write(format!("searches/2024-03-{:02}.csv", 5 + day), text);
    }
}

/// Returns the samples by definition.
fn samples(searches: &[Search]) -> Vec<Sample> {
    let mut samples = Vec::new();
    for search in searches {
        let mut clicks: Vec<(i64, &str, &str)> = Vec::new();
        for other in searches.iter().filter(|other| other.user == search.user) {
            clicks.extend(other.click.as_ref().map(|(hotel, at)| (*at, &*other.id, &**hotel)));
        }
        clicks.retain(|(at, ..)| *at < search.at);
        clicks.sort();
        let clicked = clicks[clicks.len().saturating_sub(10)..].iter().map(|(.., hotel)| *hotel);
        for (position, (hotel, price)) in search.hotels.iter().enumerate() {
            let session = format!("{} on {}", search.session, search.platform);
            let is_clicked = search.click.as_ref().is_some_and(|(clicked, _)| clicked == hotel);
            let mut sample = Sample::new(&[&search.id, hotel], session, search.at * 1_000_000)
                .float("clicked", is_clicked)
                .float("position", position as i32 + 1)
                .float("price", *price)
                .ids("hotel", [hotel])
                .hashes("user_id", [&search.user])
                .ids("platform", [search.platform])
                .ids("destination", [search.destination])
                .hashes("filters", &search.filters)
                .ids("shown", search.hotels.iter().map(|(hotel, _)| hotel))
                .ids("clicked_hotels", clicked.clone());
            sample.partition = format!("platform={}/", search.platform);
            samples.push(sample);
        }
    }
    add_days(&mut samples);
    samples
}

#[test]
fn searches_become_a_sample_for_each_hotel() {
    let searches = searches();
    let dir = Dir::new();
    write_log(&dir, &searches);
    let summary = build(&dir, EXAMPLE, "travel");
    let mut expected = samples(&searches);
    let again: usize = searches.iter().step_by(9).map(|search| search.hotels.len()).sum();
    assert_eq!(summary["skipped"]["duplicate_samples"], again);
    let dataset = dir.path("travel");
    let clicks = searches.iter().filter_map(|search| Some(search.click.as_ref()?.0.clone()));
    let hotels = Numbers {
        name: "hotels",
        logged: &["hotel", "shown"],
        windows: &["clicked_hotels"],
        rows: clicks.collect(),
        min_count: 5,
    };
    let of_one = |name: &'static str, logged: &'static [&'static str], min_count| Numbers {
        name,
        logged,
        windows: &[],
        rows: vec![],
        min_count,
    };
    for numbers in [hotels, of_one("platform", &["platform"], 1), of_one("destination", &["destination"], 20)]
    {
        numbers.check(&dataset, &mut expected);
    }

    // The log contains the hard cases: clicks after the next search, sessions on two platforms or days, and searches
    // without results.
    assert!(expected.len() > 400, "{} samples", expected.len());
    let is_late = |pair: &[Search]| {
        let click = pair[0].click.as_ref();
        pair[0].session == pair[1].session && click.is_some_and(|(_, at)| *at >= pair[1].at)
    };
    assert!(searches.windows(2).filter(|pair| is_late(pair)).count() > 10);
    let is_on_two =
        |pair: &[Search]| pair[0].session == pair[1].session && pair[0].platform != pair[1].platform;
    assert!(searches.windows(2).any(is_on_two));
    assert!(searches.iter().any(|search| search.hotels.is_empty()));
    assert!(expected.iter().any(|sample| sample.lists["clicked_hotels"].len() > 5));
    let day_of_time = |sample: &Sample| (sample.time / 1_000_000 - DAY) / 86_400 + 5;
    let lasts = |sample: &Sample| !sample.partition.ends_with(&format!("{:02}", day_of_time(sample)));
    assert!(expected.iter().any(lasts), "a session must go on after midnight");
    check(&dataset, expected);
}

#[test]
fn mistakes_are_explained() {
    let dir = Dir::new();
    let mut searches = searches();
    write_log(&dir, &searches);
    let seconds = "time = { column = \"searched_at\", unit = \"s\" }";
    let parts = [
        "`[session].time`",
        "`searched_at` is Int64",
        "only `s` is plausible",
        &format!("write `{seconds}`"),
    ];
    fails(&dir, EXAMPLE, seconds, "time = \"searched_at\"", &parts);
    let parts = ["`[[timelines]]` 1: `time`", "`clicked_at`", "unit = \"s\""];
    fails(&dir, EXAMPLE, "time = { column = \"clicked_at\", unit = \"s\" }", "time = \"clicked_at\"", &parts);
    let parts = ["column `hotel`", "Utf8", "`ids = \"hash\"`", "`vocabulary = \"frequency\"`"];
    fails(
        &dir,
        EXAMPLE,
        "hotel = { kind = \"sparse\", vocabulary = \"hotels\" }",
        "hotel = { kind = \"sparse\" }",
        &parts,
    );

    // A price is missing.
    let search = searches.iter_mut().find(|search| search.hotels.len() > 2).unwrap();
    let line = search.line();
    let broken = line.replace(&format!("|{}", search.hotels[1].1), "|");
    assert_ne!(line, broken);
    dir.write("searches/2024-03-07.csv", format!("{HEADER}{broken}"));
    fails(&dir, EXAMPLE, "unit", "unit", &["`[checks].parallel`", "lists of different lengths"]);
}
