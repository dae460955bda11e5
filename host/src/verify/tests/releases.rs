//! Forms that came with a release of ggml: row S25 of the cases.

use super::super::ops::FAMILIES;
use super::super::tensor::CheckedTensor;
use super::super::types::F32;
use super::honest::{case, cases, f};
use super::{Case, rules, rules_of, t};
use apir_ggml::Version;
use apir_ggml::layout::OLDEST_VERSION;

/// A version right before another.
fn before(version: Version) -> Version {
    match version.patch {
        0 => Version::new(version.major, version.minor - 1, 999),
        patch => Version { patch: patch - 1, ..version },
    }
}

#[test]
fn s25_a_release_gets_no_form_that_came_after_it() {
    for rule in FAMILIES.iter().flat_map(|(_, rules)| *rules) {
        for form in rule.since {
            assert!(form.version > OLDEST_VERSION, "{}: {} is in every supported ggml", rule.name, form.what);
            let (old, new) = (rules_of(before(form.version), true), rules_of(form.version, true));
            let told = format!(
                "{} with {}: this ggml is too old ({}, limit {})",
                rule.name,
                form.what,
                before(form.version),
                form.version
            );
            let named = |case: &Case| case.check(&old).is_err_and(|words| words.ends_with(&told));
            let found: Vec<_> =
                cases().into_iter().filter(|case| case.op == rule.name && named(case)).collect();
            assert!(!found.is_empty(), "no honest node shows: {told}");
            // What later releases may still lack of it is another form.
            assert!(
                found.iter().all(|case| case.check(&new).is_ok_and(|()| true)
                    || case.check(&new).is_err_and(|words| words.contains("this ggml is too old"))),
                "{told}"
            );
            // Other devices answer for their own kernels.
            let other = rules_of(before(form.version), false);
            assert_eq!(found.iter().any(|case| case.check(&other).is_ok()), form.cpu, "{told}");
        }
    }
}

#[test]
fn s25_every_honest_node_is_old_or_names_the_release_it_came_with() {
    let oldest = rules_of(OLDEST_VERSION, true);
    for case in cases() {
        // Its state has had another shape.
        if case.op == "GATED_DELTA_NET" {
            continue;
        }
        match case.check(&oldest) {
            Ok(()) => {}
            Err(words) => assert!(words.contains("this ggml is too old (0.13.0, limit 0."), "{words}"),
        }
    }
}

#[test]
fn s25_types_came_with_releases_too() {
    let q2_0 = t(42, &[64]);
    assert!(CheckedTensor::from_raw(&q2_0, &rules_of(Version::new(0, 15, 3), true)).is_err());
    assert!(CheckedTensor::from_raw(&q2_0, &rules()).is_ok());
}

#[test]
fn s25_a_delta_net_s_snapshots_lay_in_its_state() {
    let (old, new) = (rules_of(Version::new(0, 14, 0), true), rules());
    let now = case("GATED_DELTA_NET");
    // As ggml 0.14 builds it: a row of all heads' matrices for each snapshot, and no parameter.
    let then = now.with(|case| {
        case.sources[5] = Some(f(&[16 * 16 * 4, 2, 3]));
        case.d.op_params[0] = 0;
    });
    assert_eq!(now.check(&new), Ok(()));
    assert_eq!(then.check(&old), Ok(()));
    // An old kernel would take 16 rows of the state for as many snapshots, and write them behind the result.
    assert!(now.check(&old).is_err());
    assert!(then.check(&new).is_err());
    assert!(then.with(|case| case.d.ne[1] += 16).check(&old).is_err());
    assert!(then.with(|case| case.d.op_params[0] = 2).check(&old).is_err());
    assert_eq!(now.d.type_, F32);
}
