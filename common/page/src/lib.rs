//! Self-contained HTML pages: no script, nothing loaded from elsewhere, light or dark as the reader's system is.

#![forbid(unsafe_code)]

pub mod svg;
pub mod text;

/// The looks of a page with plots, as CSS.
pub const STYLE: &str = include_str!("style.css");

/// A page of these parts; `title` is already escaped, and `style` its looks as CSS.
pub fn document(title: &str, style: &str, body: &[String]) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{style}</style>\n</head>\n<body>\n<main>\n{}\n</main>\n</body>\n</html>\n",
        body.join("\n")
    )
}

/// A section with its plain sentences and whatever stands below.
pub fn section(title: &str, lead: &str, content: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n<p>{lead}</p>\n{content}\n</section>")
}

/// Colours and what they mean; the colour is a class of the page.
pub fn legend(entries: &[(&str, &str)]) -> String {
    let entry = |(class, text): &(&str, &str)| {
        let thin = if *class == "mark" { " class=\"thin\"" } else { "" };
        format!("<li><i{thin} style=\"background:var(--{class})\"></i>{text}</li>")
    };
    format!("<ul class=\"legend\">{}</ul>", entries.iter().map(entry).collect::<String>())
}
