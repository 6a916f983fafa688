//! A Markdown page: its anchors, links, code and code blocks.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use lab::run::repository;
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A page of the repository.
#[derive(Debug, Default)]
pub struct Page {
    /// Its path in the repository.
    pub path: String,
    /// IDs of its headings.
    pub anchors: BTreeSet<String>,
    /// Targets of links and images, with their lines.
    pub links: Vec<(usize, String)>,
    /// Code in running text, with its lines.
    pub code: Vec<(usize, String)>,
    /// Code blocks, and comments with commands.
    pub blocks: Vec<Block>,
}

/// A fenced code block, or a comment with commands that a reader need not see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its line.
    pub line: usize,
    /// The first word after the fence: `sh`, `console`, `yaml`, or nothing.
    pub language: String,
    /// Its text.
    pub text: String,
    /// What the comment before it says.
    pub directive: Option<Directive>,
}

/// Comment before a code block about how the tests use the block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Directive {
    /// `no-run: REASON`: the commands are not run.
    NoRun(String),
    /// `example`: the output is only an example.
    Example,
    /// `apply: CONTEXT`: kubectl applies the YAML.
    Apply(String),
    /// `dry-run: CONTEXT`: the API server validates the YAML.
    DryRun(String),
    /// `values: CHART`: the YAML holds values of a chart.
    Values(String),
    /// `run: COMMANDS`: commands in the comment itself, such as the creation of an object that the page presupposes.
    Run,
    /// `cleanup: COMMANDS`: commands that run at the end of the page, also after a failure.
    Cleanup,
}

impl Directive {
    /// Parses a comment. The result's text is that of `run` and `cleanup`.
    fn parse(html: &str) -> Option<(Self, String)> {
        let text = html.trim().strip_prefix("<!--")?.strip_suffix("-->")?.trim();
        let (word, rest) = text.split_once(':').unwrap_or((text, ""));
        let rest = rest.trim().to_owned();
        let directive = match word {
            "no-run" => Self::NoRun(rest),
            "example" => Self::Example,
            "apply" => Self::Apply(rest),
            "dry-run" => Self::DryRun(rest),
            "values" => Self::Values(rest),
            "run" => return Some((Self::Run, rest)),
            "cleanup" => return Some((Self::Cleanup, rest)),
            _ => return None,
        };
        Some((directive, String::new()))
    }
}

impl Page {
    /// Reads a page of the repository.
    pub fn read(path: &str) -> Result<Self> {
        let text = std::fs::read_to_string(repository().join(path)).with_context(|| path.to_owned())?;
        Ok(Self::parse(path, &text))
    }

    /// Parses a page.
    pub fn parse(path: &str, text: &str) -> Self {
        let mut reader =
            Reader { page: Self { path: path.to_owned(), ..Self::default() }, ..Reader::default() };
        let lines = Lines::of(text);
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            reader.read(event, lines.at(range.start));
        }
        reader.page
    }
}

/// Line numbers of offsets.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(offset, _)| offset).collect())
    }

    fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|end| *end < offset) + 1
    }
}

#[derive(Default)]
struct Reader {
    page: Page,
    /// Text of the current heading.
    heading: Option<String>,
    /// How often an anchor was used.
    used: BTreeMap<String, usize>,
    /// The current HTML block.
    html: String,
    /// Comment that belongs to the next code block.
    directive: Option<Directive>,
    /// The current code block.
    block: Option<Block>,
}

impl Reader {
    fn read(&mut self, event: Event<'_>, line: usize) {
        match event {
            Event::Start(tag) => self.start(tag, line),
            Event::End(tag) => self.end(tag, line),
            Event::Html(text) => self.html.push_str(&text),
            Event::Code(text) => {
                self.add_to_heading(&text);
                self.page.code.push((line, text.into_string()));
            }
            Event::Text(text) => self.text(&text),
            _ => {}
        }
    }

    fn start(&mut self, tag: Tag<'_>, line: usize) {
        match tag {
            Tag::CodeBlock(kind) => self.start_block(&kind, line),
            Tag::HtmlBlock => self.html.clear(),
            Tag::Heading { .. } => self.heading = Some(String::new()),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                self.page.links.push((line, dest_url.into_string()));
            }
            _ => self.directive = None,
        }
    }

    fn end(&mut self, tag: TagEnd, line: usize) {
        match tag {
            TagEnd::CodeBlock => self.page.blocks.extend(self.block.take()),
            TagEnd::HtmlBlock => self.end_comment(line),
            TagEnd::Heading(_) => self.end_heading(),
            _ => {}
        }
    }

    fn start_block(&mut self, kind: &CodeBlockKind<'_>, line: usize) {
        let info = if let CodeBlockKind::Fenced(info) = kind { info.as_ref() } else { "" };
        let language = info.split_whitespace().next().unwrap_or_default().to_owned();
        self.block = Some(Block { line, language, text: String::new(), directive: self.directive.take() });
    }

    fn text(&mut self, text: &str) {
        match &mut self.block {
            Some(block) => block.text.push_str(text),
            None => self.add_to_heading(text),
        }
    }

    fn add_to_heading(&mut self, text: &str) {
        if let Some(heading) = &mut self.heading {
            heading.push_str(text);
        }
    }

    fn end_comment(&mut self, line: usize) {
        self.directive = match Directive::parse(&self.html) {
            Some((directive @ (Directive::Run | Directive::Cleanup), text)) => {
                let language = "sh".to_owned();
                self.page.blocks.push(Block { line, language, text, directive: Some(directive) });
                None
            }
            other => other.map(|(directive, _)| directive),
        };
    }

    fn end_heading(&mut self) {
        let slug = slug(&self.heading.take().unwrap_or_default());
        let used = self.used.entry(slug.clone()).or_default();
        self.page.anchors.insert(if *used == 0 { slug } else { format!("{slug}-{used}") });
        *used += 1;
    }
}

/// ID of a heading, as GitHub and mdBook derive it.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# One `--flag`, two
See [there](other.md#x) and `a/b.rs`.

<!-- no-run: needs a cluster -->
```sh
helm list
```

## One `--flag`, two

1. In a list:

   <!-- apply: guest -->
   ```yaml
   a: 1
   ```

<!-- run:
echo hidden
-->

```console
$ true
```
";

    #[test]
    fn headings_links_code_and_blocks_are_found() {
        let page = Page::parse("a.md", PAGE);
        assert_eq!(page.anchors, ["one---flag-two", "one---flag-two-1"].map(str::to_owned).into());
        assert_eq!(page.links, [(2, "other.md#x".to_owned())]);
        assert_eq!(page.code[1], (2, "a/b.rs".to_owned()));
        let block = |line, language: &str, text: &str, directive| Block {
            line,
            language: language.to_owned(),
            text: text.to_owned(),
            directive,
        };
        let expected = [
            block(5, "sh", "helm list\n", Some(Directive::NoRun("needs a cluster".to_owned()))),
            block(14, "yaml", "a: 1\n", Some(Directive::Apply("guest".to_owned()))),
            block(18, "sh", "echo hidden", Some(Directive::Run)),
            block(22, "console", "$ true\n", None),
        ];
        assert_eq!(page.blocks, expected);
    }
}
