//! docs/verifier.md lists the rules as they are. `APIR_UPDATE_DOCS=1` rewrites its generated part.

use super::super::ops::FAMILIES;
use super::super::rules::{Blocks, OpRule, Read, ResultPlace};
use std::fmt::Write;

/// What the test writes lies between two lines that name it.
fn replace(page: &str, what: &str, text: &str) -> String {
    let mark = |end: &str| format!("<!-- Generated from host/src/verify/ops by its test: {what}{end} -->\n");
    let (before, rest) = page.split_once(&mark("begin")).unwrap();
    let (_, after) = rest.split_once(&mark("end")).unwrap();
    format!("{before}{}{text}{}{after}", mark("begin"), mark("end"))
}

fn result(place: ResultPlace, rule: &OpRule) -> String {
    match place {
        ResultPlace::Fresh => "dense memory of its own".to_owned(),
        ResultPlace::Own => "memory of its own".to_owned(),
        ResultPlace::InPlace => "dense memory of its own, or in place".to_owned(),
        ResultPlace::Over(slot) => format!("over {}", rule.sources[slot].name),
        ResultPlace::OverIf(word) => {
            format!("over {} if `{}`, else dense memory of its own", rule.sources[0].name, rule.params[word])
        }
        ResultPlace::Target => {
            "over target, or a cast: dense memory of its own, and its own target".to_owned()
        }
        ResultPlace::View => "a view".to_owned(),
    }
}

fn sources(rule: &OpRule) -> String {
    let name = |source: &super::super::rules::Source| match (source.optional, source.or_empty) {
        (true, _) => format!("[{}]", source.name),
        (false, true) => format!("{} (may be empty on a CPU)", source.name),
        (false, false) => source.name.to_owned(),
    };
    rule.sources.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn describe(rule: &OpRule, text: &mut String) {
    let _ = write!(text, "\n**{}**({})", rule.name, sources(rule));
    let named = rule.params.iter().enumerate().filter(|(_, name)| !name.is_empty());
    let params: Vec<_> = named.map(|(word, name)| format!("{word} {name}")).collect();
    if !params.is_empty() {
        let _ = write!(text, "; parameters: {}", params.join(", "));
    }
    let _ = writeln!(text, "; result: {}\n", result(rule.result, rule));
    for clause in rule.clauses {
        let _ = writeln!(text, "* {}", clause.what);
    }
    for form in rule.since {
        let whose = if form.cpu { ", on a CPU" } else { "" };
        let _ = writeln!(text, "* {}: from ggml {} on{whose}", form.what, form.version);
    }
    for read in rule.reads {
        let source = rule.sources[read.source()].name;
        let _ = match read {
            Read::Index { below, .. } => writeln!(text, "* contents of {source}: from 0 to below {below}"),
            Read::Steady { .. } => {
                writeln!(text, "* contents of {source} do not change while the kernel runs, in host memory")
            }
        };
    }
    for reach in rule.reaches {
        let source = rule.sources[reach.source].name;
        let _ = writeln!(text, "* {source} is copied first where its buffer ends before {}", reach.what);
    }
    if rule.reads_result {
        let _ = writeln!(text, "* the result does not change while the kernel runs, in host memory");
    }
    for slot in rule.writes {
        let _ = writeln!(text, "* {} is written too, and lies over nothing", rule.sources[*slot].name);
    }
    for cap in rule.capped_params {
        let _ = writeln!(text, "* `{}` is taken as no more than {}", rule.params[cap.word], cap.what);
    }
    for (word, value) in rule.absent_params {
        let _ = writeln!(text, "* `{}` left 0 by an older guest means {value:#x}", rule.params[*word]);
    }
}

/// How sources may be made of blocks: by strides, dense, or not at all.
fn blocks(rule: &OpRule) -> String {
    let mut parts = Vec::new();
    for (kind, words) in [(Blocks::ByStrides, "by strides"), (Blocks::Counted, "dense")] {
        let of_kind = rule.sources.iter().filter(|source| source.blocks == kind);
        let names: Vec<_> = of_kind.map(|source| source.name).collect();
        if !names.is_empty() {
            parts.push(format!("{} {words}", names.join(", ")));
        }
    }
    parts.join("; ")
}

fn kernel(rule: &OpRule, text: &mut String) {
    let (together, share) = (rule.work.together.what, rule.work.share.what);
    let ints: Vec<_> = rule.clauses.iter().filter(|clause| clause.ints).map(|clause| clause.what).collect();
    let forms: Vec<_> = rule.since.iter().map(|form| format!("{} {}", form.version, form.what)).collect();
    let _ = writeln!(
        text,
        "| {} | {} | {together} | {share} | {} | {} | {} |",
        rule.name,
        rule.tasks.what,
        blocks(rule),
        ints.join("; "),
        forms.join("; ")
    );
}

#[test]
fn the_rules_in_the_docs_are_those_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/verifier.md");
    let mut kernels =
        "\n| operation | tasks | work memory together | and for each thread | blocks | C ints | since ggml |\n".to_owned();
    kernels.push_str("|---|---|---|---|---|---|---|\n");
    let mut rules = String::new();
    for (title, family) in FAMILIES {
        let _ = write!(rules, "\n### {title}\n");
        for rule in *family {
            describe(rule, &mut rules);
            if rule.result != ResultPlace::View {
                kernel(rule, &mut kernels);
            }
        }
    }
    kernels.push('\n');
    rules.push('\n');
    let found = std::fs::read_to_string(path).unwrap();
    let page = replace(&replace(&found, "kernels, ", &kernels), "", &rules);
    if std::env::var_os("APIR_UPDATE_DOCS").is_some() {
        std::fs::write(path, page).unwrap();
    } else {
        assert!(found == page, "docs/verifier.md is stale: run this test with APIR_UPDATE_DOCS=1");
    }
}
