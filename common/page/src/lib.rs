//! Self-contained HTML pages: they contain no scripts, load nothing from elsewhere, and follow the reader's choice of
//! a light or dark colour scheme.

#![forbid(unsafe_code)]

pub mod svg;
pub mod text;

/// The style sheet of a page with plots, as CSS.
pub const STYLE: &str = include_str!("style.css");

/// Returns an HTML page with these parts. `title` is already escaped; `style` is CSS.
pub fn document(title: &str, style: &str, body: &[String]) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{style}</style>\n</head>\n<body>\n<main>\n{}\n</main>\n</body>\n</html>\n",
        body.join("\n")
    )
}

/// Returns a section with a heading, a paragraph and `content` below them.
pub fn section(title: &str, lead: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n<p>{lead}</p>\n{content}\n</section>")
}

/// Returns a legend: pairs of a colour, given as a class of the page, and its meaning.
pub fn legend(entries: &[(&str, &str)]) -> String {
    let entry = |(class, text): &(&str, &str)| {
        let thin = if *class == "mark" { " class=\"thin\"" } else { "" };
        format!("<li><i{thin} style=\"background:var(--{class})\"></i>{text}</li>")
    };
    format!("<ul class=\"legend\">{}</ul>", entries.iter().map(entry).collect::<String>())
}
