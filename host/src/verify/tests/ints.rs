//! Counts and strides that CPU kernels hold in C ints: row S26 of the cases.

use super::super::ops::FAMILIES;
use super::super::tensor::{CheckedTensor, MAX_CPU_STRIDE};
use super::super::types::*;
use super::honest::{case, f};
use super::{Case, rules, rules_for, t};
use apir_protocol::tensor::RawTensor;

/// Nodes that are sound but for a count beyond a C int, which every `counts` clause has one of.
fn beyond_ints() -> Vec<Case> {
    let net = case("GATED_DELTA_NET").with(|case| {
        let size = 46_341;
        case.d = f(&[size, 1 + size]);
        case.d.op_params[0] = 1;
        for slot in 0..3 {
            case.sources[slot] = Some(f(&[size, 1, 1, 1]));
        }
        case.sources[3] = Some(f(&[1, 1, 1, 1]));
        case.sources[4] = Some(f(&[1, 1, 1, 1]));
        case.sources[5] = Some(f(&[size, size, 1, 1]));
    });
    let channels = (1 << 30) + 1;
    // The 32nd row of a, then of b, lies 2^31 bytes or more behind the first.
    let apart = |slot: usize| {
        let mut product = Case::new("OUT_PROD", f(&[8, 4]), &[f(&[8, 32]), f(&[4, 32])], &[]);
        product.sources[slot].as_mut().unwrap().nb[1..].fill(69_273_668);
        product
    };
    vec![
        Case::new("COUNT_EQUAL", t(I64, &[1]), &[t(I32, &[1 << 15, 1 << 15]); 2], &[]),
        Case::new("REPEAT_BACK", f(&[1 << 16, 1 << 15]), &[f(&[1 << 16, 1 << 15])], &[]),
        Case::new("GROUP_NORM", f(&[1, 1, channels]), &[f(&[1, 1, channels])], &[1 << 30, 0]),
        Case::new("OUT_PROD", f(&[1 << 16, 1 << 15]), &[f(&[1 << 16, 1]), f(&[1 << 15, 1])], &[]),
        apart(0),
        apart(1),
        Case::new("SSM_CONV", f(&[1 << 15, 65_533]), &[f(&[1 << 16, 1 << 15]), f(&[4, 1 << 15])], &[]),
        net,
    ]
}

#[test]
fn s26_counts_beyond_a_c_int_are_refused_on_a_cpu_alone() {
    let (cpu, other) = (rules(), rules_for(false, 4));
    let cases = beyond_ints();
    for rule in FAMILIES.iter().flat_map(|(_, rules)| *rules) {
        for clause in rule.clauses.iter().filter(|clause| clause.ints) {
            let words = format!("{} breaks the rule: {}", rule.name, clause.what);
            let breaks = |case: &&Case| case.check(&cpu).is_err_and(|error| error.ends_with(&words));
            assert!(cases.iter().any(|case| breaks(&case)), "{words}");
        }
    }
    for case in cases {
        assert!(case.check(&cpu).is_err(), "{}", case.op);
        assert_eq!(case.check(&other), Ok(()), "{}", case.op);
    }
}

#[test]
fn s26_rows_that_a_kernel_takes_32_of_lie_near_each_other() {
    let product = |a: u32, rows: i64, stride: u64| {
        let mut product = Case::new("OUT_PROD", f(&[8, 4]), &[t(a, &[8, rows]), f(&[4, rows])], &[]);
        for source in product.sources.iter_mut().flatten() {
            source.nb[1..].fill(stride);
        }
        product.check(&rules())
    };
    assert!(product(F32, 32, 69_273_668).unwrap_err().ends_with("less than 2^31 bytes apart"));
    assert_eq!(product(F32, 32, 69_273_664), Ok(()));
    assert_eq!(product(F32, 1000, 4096), Ok(()));
    // Fewer rows, and other types, are taken one by one.
    assert_eq!(product(F32, 31, 69_273_668), Ok(()));
    assert_eq!(product(F16, 32, 69_273_668), Ok(()));
}

#[test]
fn s26_strides_beyond_a_c_int_are_refused_on_a_cpu_alone() {
    let (cpu, other) = (rules(), rules_for(false, 4));
    let rows = |stride: u64| RawTensor { nb: [4, stride, 2 * stride, 2 * stride], ..f(&[16, 2]) };
    for stride in [1 << 31, (1 << 32) - 4, 1 << 32] {
        let error = CheckedTensor::from_raw(&rows(stride), &cpu).unwrap_err().to_string();
        assert!(error.contains("bytes from row to row on a CPU"), "{error}");
        assert!(CheckedTensor::from_raw(&rows(stride), &other).is_ok());
        // As OUT_PROD takes them: b's rows lie at any distance.
        let product = case("OUT_PROD").with(|case| {
            case.sources[1] = Some(RawTensor { nb: [4, stride, 3 * stride, 3 * stride], ..f(&[4, 3]) });
        });
        assert!(product.check(&cpu).is_err());
        assert_eq!(product.check(&other), Ok(()));
        // Columns of a transposed tensor.
        let columns = RawTensor { nb: [stride, 4, 2 * stride, 2 * stride], ..f(&[2, 16]) };
        assert!(CheckedTensor::from_raw(&columns, &cpu).is_err());
    }
    assert!(CheckedTensor::from_raw(&rows(MAX_CPU_STRIDE & !3), &cpu).is_ok());
}

#[test]
fn s26_tensors_of_large_models_pass() {
    let cpu = rules();
    for (what, tensor) in [
        ("an embedding of 4 GiB", t(F16, &[8192, 1 << 18])),
        ("experts of 12 GiB", t(F16, &[8192, 6144, 128])),
        ("a cache of 16 GiB", t(F16, &[1024, 1 << 20, 8])),
        (
            "the same by heads",
            RawTensor { ne: [128, 1 << 20, 8, 8], nb: [2, 2048, 256, 1 << 31], ..t(F16, &[128]) },
        ),
        ("scores of 64 GiB", f(&[1 << 18, 2048, 32])),
        ("one row, whatever its stride", RawTensor { nb: [4, 1 << 40, 7, 9], ..f(&[16]) }),
        ("no rows", RawTensor { nb: [4, 1 << 40, 7, 9], ..f(&[16, 0]) }),
    ] {
        let checked = CheckedTensor::from_raw(&tensor, &cpu).map(|_| ());
        assert_eq!(checked.map_err(|error| error.to_string()), Ok(()), "{what}");
    }
}

#[test]
fn s26_a_state_fills_vectors_on_a_cpu() {
    let with = |size: i64| {
        case("SSM_SCAN").with(|case| {
            case.d = f(&[4 * 2 * 5 * 3 + size * 4 * 2 * 3]);
            case.sources[0] = Some(f(&[size, 4, 2, 9]));
            case.sources[4] = Some(f(&[size, 1, 5, 3]));
            case.sources[5] = Some(f(&[size, 1, 5, 3]));
        })
    };
    for size in [16, 32, 48, 64, 128, 256] {
        assert_eq!(with(size).check(&rules()), Ok(()), "{size}");
    }
    for size in [8, 20, 24, 100] {
        assert!(with(size).check(&rules()).unwrap_err().ends_with("multiples of 16"), "{size}");
        assert_eq!(with(size).check(&rules_for(false, 4)), Ok(()), "{size}");
    }
}

#[test]
fn s09_a_row_of_one_block_spans_the_block_whatever_its_stride() {
    let rules = rules_for(true, 1);
    for stride in [1, 2, 33, 34, 68] {
        let raw = RawTensor { type_: 8, ne: [32, 2, 1, 1], nb: [stride, 34, 68, 68], ..RawTensor::default() };
        let tensor = CheckedTensor::from_raw(&raw, &rules).unwrap();
        assert_eq!((tensor.nb()[0], tensor.extent()), (34, 68), "stride {stride}");
    }
}
