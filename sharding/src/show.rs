//! A plan as a page: every rank with its time and memory, and where the large tables stand.

use std::fmt::Write;

use onefold_base::units::{format_bytes, format_count};

use crate::{Plan, RankGroup, RankPrediction, Shard, ShardingType, TablePlan, Topology};

/// Tables listed in full; the rest are counted.
const LISTED: usize = 200;
const CHART_WIDTH: f64 = 720.0;
const LABEL_WIDTH: f64 = 64.0;
const VALUE_WIDTH: f64 = 150.0;

/// A self-contained page with the plan's ranks and tables.
pub fn html(plan: &Plan) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Plan</title><style>{STYLE}</style></head><body>\n<h1>Where embedding tables stand</h1>\n"
    );
    summary(&mut page, plan);
    page.push_str("<h2>Predicted time per step, by rank</h2>\n");
    legend(
        &mut page,
        &[
            ("compute", "computation"),
            ("communication", "communication"),
            ("worst", "computation of the bottleneck"),
        ],
    );
    cost_chart(&mut page, plan);
    page.push_str("<h2>Memory, by rank</h2>\n");
    legend(&mut page, &[("memory", "tables and optimizer state"), ("buffer", "exchange buffers")]);
    memory_chart(&mut page, plan);
    page.push_str("<h2>Tables</h2>\n");
    table_list(&mut page, plan);
    page.push_str("</body></html>\n");
    page
}

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;color:#1b2733;max-width:1000px;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin:2rem 0 .4rem}\
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:1rem 0}dt{color:#5b6b7a}dd{margin:0}\
.note{background:#fff4d6;border-left:4px solid #e0a100;padding:.5rem .8rem;margin:.6rem 0}\
table{border-collapse:collapse;width:100%;font-size:14px}th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #e3e8ee;vertical-align:top}\
th{color:#5b6b7a;font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
svg{display:block;width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#1b2733}svg .muted{fill:#5b6b7a}\
.compute{fill:#2f6db3;background:#2f6db3}.communication{fill:#7fb2e5;background:#7fb2e5}.worst{fill:#c8442f;background:#c8442f}\
.memory{fill:#3d8b62;background:#3d8b62}.buffer{fill:#a5d3b8;background:#a5d3b8}.limit{stroke:#c8442f;stroke-width:1.5;stroke-dasharray:4 3}\
.legend span{margin-right:1.2rem;white-space:nowrap}.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem;vertical-align:-1px}\
@media(prefers-color-scheme:dark){body{background:#12181f;color:#dbe4ec}svg text{fill:#dbe4ec}svg .muted,dt,th{fill:#93a4b3;color:#93a4b3}\
th,td{border-color:#2a3542}.note{background:#3a300f}}";

/// Text in HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn summary(page: &mut String, plan: &Plan) {
    let topology = &plan.topology;
    let mut shards = 0;
    let mut kinds = [0usize; 4];
    for table in &plan.tables {
        shards += table.shards.len();
        kinds[table.sharding_type as usize] += 1;
    }
    let all = [
        ShardingType::TableWise,
        ShardingType::ColumnWise,
        ShardingType::RowWise,
        ShardingType::DataParallel,
    ];
    let counted: Vec<String> = all
        .iter()
        .zip(kinds)
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| format!("{} {}", format_count(count as u64), kind.name()))
        .collect();
    let costs: Vec<f64> = plan.ranks.iter().map(RankPrediction::cost_ms).collect();
    let mean = costs.iter().sum::<f64>() / costs.len().max(1) as f64;
    let balance = if plan.max_cost_ms > 0.0 { 100.0 * mean / plan.max_cost_ms } else { 100.0 };
    let bottleneck = plan.bottleneck().map_or(0, |rank| rank.rank);
    let rows = [
        (
            "Predicted cost",
            format!(
                "<b>{:.4} ms</b> per step of {} samples, set by rank {bottleneck}; the mean rank takes {mean:.4} ms ({balance:.0} %)",
                plan.max_cost_ms,
                format_count(plan.global_batch_size)
            ),
        ),
        (
            "Tables",
            format!(
                "{}, in {} shards: {}",
                format_count(plan.tables.len() as u64),
                format_count(shards as u64),
                counted.join(", ")
            ),
        ),
        (
            "Ranks",
            format!(
                "{} on {}, {}",
                format_count(u64::from(topology.ranks)),
                if topology.nodes() == 1 {
                    "one machine".to_owned()
                } else {
                    format!("{} machines", format_count(u64::from(topology.nodes())))
                },
                hardware(topology)
            ),
        ),
        ("Search", escaped(&plan.search)),
        ("Cost model", escaped(&plan.cost_model)),
    ];
    page.push_str("<dl>");
    for (name, value) in rows {
        let _ = write!(page, "<dt>{name}</dt><dd>{value}</dd>");
    }
    page.push_str("</dl>\n");
    for note in &plan.notes {
        let _ = writeln!(page, "<p class=\"note\">{}</p>", escaped(note));
    }
}

/// What ranks have and are: `80.0 GiB each for tables and buffers`, or that of each group.
fn hardware(topology: &Topology) -> String {
    let of = |rank: u32| {
        let memory = format_bytes(topology.memory_of(rank));
        let name = topology.hardware_of(rank).map(|name| format!(", {}", escaped(name)));
        format!("{memory} each for tables and buffers{}", name.unwrap_or_default())
    };
    if topology.groups.is_empty() {
        return of(0);
    }
    let mut first = 0;
    let group = |group: &RankGroup| {
        let text = format!("{} with {}", format_count(u64::from(group.ranks)), of(first));
        first += group.ranks;
        text
    };
    topology.groups.iter().map(group).collect::<Vec<_>>().join("; ")
}

fn legend(page: &mut String, entries: &[(&str, &str)]) {
    page.push_str("<p class=\"legend\">");
    for (class, text) in entries {
        let _ = write!(page, "<span><i class=\"{class}\"></i>{text}</span>");
    }
    page.push_str("</p>\n");
}

/// One horizontal bar of parts.
struct Bar {
    label: String,
    parts: Vec<(&'static str, f64)>,
    value: String,
    /// Where it may not grow beyond, if that is another place than other bars'.
    limit: Option<f64>,
}

/// Bars from the top down, all on the scale of `most`; a line at `limit`.
fn bars(page: &mut String, bars: &[Bar], most: f64, limit: Option<f64>) {
    // With many ranks, bars get thin and only some are labelled.
    let (height, every) = match bars.len() {
        0..=32 => (22.0, 1),
        33..=128 => (9.0, 8),
        many => (2.0f64.max(1200.0 / many as f64), many / 16),
    };
    let total = height * bars.len() as f64 + 24.0;
    let scale = if most > 0.0 { CHART_WIDTH / most } else { 0.0 };
    let width = LABEL_WIDTH + CHART_WIDTH + VALUE_WIDTH;
    let _ = write!(page, "<svg viewBox=\"0 0 {width} {total:.1}\" role=\"img\">");
    for (i, bar) in bars.iter().enumerate() {
        let y = i as f64 * height;
        let middle = y + height * 0.5 + 4.0;
        if i % every == 0 {
            let _ = write!(
                page,
                "<text class=\"muted\" x=\"{}\" y=\"{middle:.1}\" text-anchor=\"end\">{}</text>",
                LABEL_WIDTH - 8.0,
                bar.label
            );
        }
        let mut x = LABEL_WIDTH;
        let thickness = height * 0.72;
        for (class, value) in &bar.parts {
            let wide = value * scale;
            let _ = write!(
                page,
                "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{:.2}\" width=\"{wide:.2}\" height=\"{thickness:.2}\"><title>{} {}</title></rect>",
                y + height * 0.14,
                bar.label,
                bar.value
            );
            x += wide;
        }
        if let Some(limit) = bar.limit {
            let (x, bottom) = (LABEL_WIDTH + limit * scale, y + height);
            let _ = write!(
                page,
                "<line class=\"limit\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{y:.1}\" y2=\"{bottom:.1}\"/>"
            );
        }
        if height > 12.0 {
            let _ = write!(
                page,
                "<text x=\"{:.1}\" y=\"{middle:.1}\">{}</text>",
                LABEL_WIDTH + CHART_WIDTH + 8.0,
                bar.value
            );
        }
    }
    if let Some(limit) = limit {
        let x = LABEL_WIDTH + limit * scale;
        let bottom = total - 20.0;
        let _ = write!(
            page,
            "<line class=\"limit\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{bottom:.1}\"/><text class=\"muted\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">limit</text>",
            total - 6.0
        );
    }
    page.push_str("</svg>\n");
}

fn cost_chart(page: &mut String, plan: &Plan) {
    let worst = plan.bottleneck().map(|rank| rank.rank);
    let bar = |rank: &RankPrediction| {
        let compute = if Some(rank.rank) == worst { "worst" } else { "compute" };
        Bar {
            label: format!("rank {}", rank.rank),
            parts: vec![(compute, rank.compute_ms), ("communication", rank.communication_ms)],
            value: format!("{:.4} + {:.4} ms", rank.compute_ms, rank.communication_ms),
            limit: None,
        }
    };
    let all: Vec<Bar> = plan.ranks.iter().map(bar).collect();
    bars(page, &all, plan.max_cost_ms, None);
}

fn memory_chart(page: &mut String, plan: &Plan) {
    let topology = &plan.topology;
    let limits: Vec<f64> = plan.ranks.iter().map(|rank| topology.memory_of(rank.rank) as f64).collect();
    let limit = limits.iter().copied().fold(0.0, f64::max);
    let alike = limits.iter().all(|other| *other == limit);
    let bar = |rank: &RankPrediction| Bar {
        label: format!("rank {}", rank.rank),
        limit: (!alike).then(|| topology.memory_of(rank.rank) as f64),
        parts: vec![
            ("memory", rank.memory_bytes as f64),
            ("buffer", (rank.buffer_bytes + rank.reserve_bytes) as f64),
        ],
        value: format!(
            "{} + {}",
            format_bytes(rank.memory_bytes),
            format_bytes(rank.buffer_bytes + rank.reserve_bytes)
        ),
    };
    let all: Vec<Bar> = plan.ranks.iter().map(bar).collect();
    if !alike {
        return bars(page, &all, limit, None);
    }
    let fullest = plan.ranks.iter().map(|rank| rank.total_bytes() as f64).fold(0.0, f64::max);
    // The limit is drawn where it does not squeeze the bars to nothing.
    if fullest * 4.0 < limit {
        bars(page, &all, fullest, None);
        let _ = writeln!(
            page,
            "<p>The fullest rank holds {:.1} % of the limit of {}.</p>",
            100.0 * fullest / limit,
            format_bytes(limit as u64)
        );
    } else {
        bars(page, &all, limit, Some(limit));
    }
}

fn table_list(page: &mut String, plan: &Plan) {
    let mut tables: Vec<&TablePlan> = plan.tables.iter().collect();
    let elements = |table: &TablePlan| u128::from(table.rows) * u128::from(table.dim);
    tables.sort_by_key(|table| std::cmp::Reverse(elements(table)));
    page.push_str("<table><tr><th>table</th><th class=\"n\">rows</th><th class=\"n\">dimension</th><th>sharding</th><th>ranks</th><th>why</th></tr>\n");
    for table in tables.iter().take(LISTED) {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escaped(&table.name),
            format_count(table.rows),
            table.dim,
            table.sharding_type.name(),
            ranks(table),
            escaped(table.reason.as_deref().unwrap_or(""))
        );
    }
    page.push_str("</table>\n");
    if tables.len() > LISTED {
        let _ = writeln!(
            page,
            "<p>{} smaller tables are not listed.</p>",
            format_count((tables.len() - LISTED) as u64)
        );
    }
}

/// `3`, `0–7`, or `1 (0–31), 4 (32–63)` for columns.
fn ranks(table: &TablePlan) -> String {
    const SHOWN: usize = 8;
    let shard = |shard: &Shard| match table.sharding_type {
        ShardingType::ColumnWise => {
            format!(
                "{} (columns {}–{})",
                shard.rank,
                shard.columns.start,
                shard.columns.end.saturating_sub(1)
            )
        }
        _ => shard.rank.to_string(),
    };
    let mut all: Vec<u32> = table.shards.iter().map(|shard| shard.rank).collect();
    all.sort_unstable();
    if let ([first, .., last], false) = (&all[..], table.sharding_type == ShardingType::ColumnWise)
        && (last - first) as usize + 1 == all.len()
    {
        return format!("{first}–{last}");
    }
    let mut texts: Vec<String> = table.shards.iter().take(SHOWN).map(shard).collect();
    if table.shards.len() > SHOWN {
        texts.push(format!("… {} in all", table.shards.len()));
    }
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnalyticCost, Beam, Search, Table};

    #[test]
    fn the_page_shows_every_rank_and_table_and_escapes_names() {
        let tables: Vec<Table> = (0..6).map(|i| Table::new(format!("t<{i}>"), 1000 * (i + 1), 64)).collect();
        let topology = Topology::h100(4, 4 << 20).unwrap();
        let plan =
            Beam::Full.plan(&tables, &topology, &AnalyticCost, topology.global_batch_size(64)).unwrap();
        let page = html(&plan);
        for i in 0..6 {
            assert!(page.contains(&format!("<td>t&lt;{i}&gt;</td>")), "{page}");
        }
        assert!(!page.contains("t<0>"));
        for rank in 0..4 {
            // Once in each chart.
            assert_eq!(page.matches(&format!("text-anchor=\"end\">rank {rank}</text>")).count(), 2);
        }
        assert!(page.contains("class=\"worst\"") && !page.contains("http"));
        assert!(plan.tables.iter().all(|table| table.reason.is_some()));
    }
}
