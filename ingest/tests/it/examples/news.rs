//! `news.toml`: requests with histories and pairs of articles and clicks, and a file of articles.

use std::collections::BTreeMap;

use chrono::DateTime;

use super::{Numbers, Random, Sample, add_days, build, check, divide_by_pauses, fails};
use crate::logs::Dir;

const EXAMPLE: &str = include_str!("../../../examples/news.toml");
/// 2019-11-14T00:00 in New York, in seconds since 1970. New York is five hours behind UTC on that day.
const DAY: i64 = 1_573_689_600 + 5 * 3600;
const ARTICLES: u64 = 90;
/// Titles with quotes in all places, closed or not.
const TITLES: [&str; 6] = [
    "\"A close race\" on the Lake",
    "\"Storm season begins",
    "Which 55\" screen  to buy?",
    "Æbler, and what to do with them",
    "It\"s done",
    "Ten \"easy\" dinners, \"in\" ten minutes\"",
];
const SECTIONS: [&str; 4] = ["sports", "weather", "tech", "food"];

/// A row of `articles.tsv`; some articles have no topic.
struct Article {
    section: &'static str,
    topic: Option<String>,
    title: String,
}

/// A row of `requests.tsv`.
struct Request {
    number: i64,
    user: String,
    /// The time in seconds since 1970.
    at: i64,
    history: Vec<String>,
    /// The articles shown, and whether they were clicked.
    shown: Vec<(String, bool)>,
}

impl Request {
    fn line(&self) -> String {
        let local = DateTime::from_timestamp(self.at - 5 * 3600, 0).unwrap();
        let pairs: Vec<String> = self
            .shown
            .iter()
            .map(|(article, clicked)| format!("{article}-{}", i32::from(*clicked)))
            .collect();
        format!(
            "{}\t{}\t{}\t{}\t{}\n",
            self.number,
            self.user,
            local.format("%-m/%-d/%Y %-I:%M:%S %p"),
            self.history.join(" "),
            pairs.join(" ")
        )
    }
}

/// Returns articles by id. Every ninth id has no article.
fn articles() -> BTreeMap<String, Article> {
    let mut random = Random(2);
    let numbers = (0..ARTICLES as i64).filter(|number| number % 9 != 0);
    let article = |number: i64| {
        let topic = random.percent(80).then(|| format!("topic {}", random.below(9)));
        let title = format!("{} ({})", TITLES[random.below(6) as usize], number % 7);
        (id(number), Article { section: SECTIONS[random.below(4) as usize], topic, title })
    };
    numbers.map(article).collect()
}

fn id(number: i64) -> String {
    format!("N{}", 100 + 7 * number)
}

/// Returns two days of requests. Users pause for exactly half an hour, or a second longer.
fn requests() -> Vec<Request> {
    let mut random = Random(3);
    let mut all: Vec<Request> = Vec::new();
    for user in 0..35 {
        let mut at = DAY + random.below(40 * 3600);
        let mut history: Vec<String> = (0..random.below(4)).map(|_| id(random.below(ARTICLES))).collect();
        for _ in 0..2 + random.below(5) {
            let mut shown: Vec<(String, bool)> = Vec::new();
            for _ in 0..1 + random.below(7) {
                let article = match random.percent(6) {
                    true => id(ARTICLES as i64 + random.below(300)),
                    false => id(random.below(10) * random.below(10)),
                };
                if shown.iter().all(|(other, _)| *other != article) {
                    shown.push((article, random.percent(25)));
                }
            }
            let clicked: Vec<String> =
                shown.iter().filter(|(_, clicked)| *clicked).map(|(article, _)| article.clone()).collect();
            let number = 800 + all.len() as i64;
            all.push(Request { number, user: format!("U{user}"), at, history: history.clone(), shown });
            history.extend(clicked);
            at += [61, 600, 1800, 1801, 10_000][random.below(5) as usize];
        }
    }
    all
}

fn write_logs(dir: &Dir, requests: &[Request], articles: &BTreeMap<String, Article>) {
    dir.write("requests.tsv", requests.iter().map(Request::line).collect::<String>());
    let line = |(id, article): (&String, &Article)| {
        format!(
            "{id}\t{}\t{}\t{}\n",
            article.section,
            article.topic.as_deref().unwrap_or_default(),
            article.title
        )
    };
    dir.write("articles.tsv", articles.iter().map(line).collect::<String>());
}

/// Returns the samples by definition.
fn samples(requests: &[Request], articles: &BTreeMap<String, Article>) -> Vec<Sample> {
    let mut samples = Vec::new();
    for request in requests {
        for (id, clicked) in &request.shown {
            let article = articles.get(id);
            let title = article.map_or_else(String::new, |article| article.title.to_lowercase());
            let length = article.map_or(0, |article| article.title.chars().count());
            let sample = Sample::new(&[&request.number, id], request.user.clone(), request.at * 1_000_000)
                .float("clicked", *clicked)
                .float("history_length", request.history.len() as u32)
                .float("title_length", length as u32)
                .hashes("user_id", [&request.user])
                .ids("history", &request.history)
                .ids("article", [id])
                .ids("section", article.map(|article| article.section))
                .ids("topic", article.and_then(|article| article.topic.clone()))
                .hashes("title_words", title.split_whitespace());
            samples.push(sample);
        }
    }
    divide_by_pauses(&mut samples);
    add_days(&mut samples);
    samples
}

#[test]
fn pairs_become_samples_with_their_articles() {
    let (requests, articles) = (requests(), articles());
    let dir = Dir::new();
    write_logs(&dir, &requests, &articles);
    let summary = build(&dir, EXAMPLE, "news");
    let mut expected = samples(&requests, &articles);
    let without = expected.iter().filter(|sample| sample.lists["section"].is_empty()).count();
    assert_eq!(summary["skipped"]["samples_without_attributes"], without);
    let dataset = dir.path("news");
    let all: [(&str, &[&str], u64); 3] =
        [("articles", &["article", "history"], 3), ("section", &["section"], 1), ("topic", &["topic"], 1)];
    for (name, logged, min_count) in all {
        Numbers { name, logged, windows: &[], rows: vec![], min_count }.check(&dataset, &mut expected);
    }

    // The log contains the hard cases: users without a history, unknown articles, and days that begin in the evening in
    // New York.
    assert!(expected.len() > 400 && without > 20, "{} samples, {without} without an article", expected.len());
    assert!(requests.iter().any(|request| request.history.is_empty()));
    let pauses = |pause: i64| {
        let pairs = requests.windows(2).filter(|pair| pair[0].user == pair[1].user);
        pairs.filter(|pair| pair[1].at - pair[0].at == pause).count()
    };
    assert!(pauses(1800) > 5 && pauses(1801) > 5);
    let local_day = |sample: &Sample| format!("{:02}", 14 + (sample.time / 1_000_000 - DAY) / 86_400);
    assert!(expected.iter().filter(|sample| !sample.partition.ends_with(&local_day(sample))).count() > 50);
    check(&dataset, expected);
}

#[test]
fn mistakes_are_explained() {
    let dir = Dir::new();
    write_logs(&dir, &requests(), &articles());
    let parts = ["`shown_at`", "/2019 ", "in the format `%d/%m/%Y %I:%M:%S %p`"];
    fails(&dir, EXAMPLE, "%m/%d/%Y", "%d/%m/%Y", &parts);
    let format = ", format = \"%m/%d/%Y %I:%M:%S %p\"";
    fails(&dir, EXAMPLE, format, "", &["`shown_at`", "is not a time", "format = "]);
    fails(&dir, EXAMPLE, "quote = \"none\"", "", &["articles.tsv", "line ", "quote = \"none\""]);
    let parts = ["requests.tsv", "`header = false`"];
    fails(&dir, EXAMPLE, "header = false                                   # so", "# so", &parts);
}
