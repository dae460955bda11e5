//! What passes the rules is computed by the real CPU kernels: nothing but the result changes, and nothing around its tensors shows in it.
//!
//! `APIR_MUTANTS` says how many changes to each honest node are tried. The question whether the device supports a node and the graph that has it get the
//! same answer: rows S25 and T28 of the cases.

use crate::plugin::{Callbacks, apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize};
use crate::verify::graph::{Terms, Verifier};
use crate::verify::indices::IndexCheck;
use crate::verify::node::Node;
use crate::verify::ops::{FAMILIES, find};
use crate::verify::rules::{OpRule, Read, RuleBook};
use crate::verify::tests::clauses::{Numbers, change};
use crate::verify::tests::honest::cases;
use crate::verify::tests::work::every_kernel;
use crate::verify::tests::{Case, op, rules_for};
use crate::verify::types::{F32, I32, I64};
use crate::verify::{BufferInfo, Buffers};
use apir_ggml::abi::FLAG_COMPUTE;
use apir_ggml::{GgmlLibrary, OpTable};
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::graph::encode_graph;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor, TensorRecord};
use apir_protocol::{Request, Wire};
use memmap2::MmapMut;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

const CONTEXT: u32 = 4_000_000_001;
/// With the number of its threads added, a context of so many.
const WIDE_CONTEXT: u32 = 4_000_001_000;
/// Bytes of the buffer, and of what lies untouched before and behind each tensor.
const BUFFER: usize = 1 << 20;
const GUARD: u64 = 256;
const GRAPH: usize = 16 << 10;
/// Id of the node.
const NODE: u64 = 100;

static LIBRARY: LazyLock<CString> = LazyLock::new(|| {
    let folder =
        std::env::var("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so");
    CString::new(format!("{folder}/libggml-cpu.so")).unwrap()
});
/// Every libggml-cpu has it, loadable or linked.
const REGISTRATION: &CStr = c"ggml_backend_cpu_reg";
/// Addresses of resources 1, the buffer, and 2, the graph.
static BLOBS: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

unsafe extern "C" fn get_config(ctx_id: u32, key: *const c_char) -> *const c_char {
    // SAFETY: the plugin gives a C string.
    let key = unsafe { CStr::from_ptr(key) };
    match key.to_bytes() {
        b"ggml.library.path" => LIBRARY.as_ptr(),
        b"apir.host_threads" => match ctx_id.wrapping_sub(WIDE_CONTEXT) {
            1 => c"1".as_ptr(),
            2 => c"2".as_ptr(),
            4 => c"4".as_ptr(),
            _ => std::ptr::null(),
        },
        b"ggml.library.reg" => REGISTRATION.as_ptr(),
        b"apir.max_bad_commands" => c"1000000000000".as_ptr(),
        _ => std::ptr::null(),
    }
}

unsafe extern "C" fn get_shmem_ptr(_ctx_id: u32, res_id: u32) -> *mut c_void {
    BLOBS[res_id as usize - 1].load(Ordering::Relaxed) as *mut c_void
}

/// The tests share two blobs.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

static CALLBACKS: Callbacks = Callbacks { get_config: Some(get_config), get_shmem_ptr: Some(get_shmem_ptr) };

fn shared(len: usize) -> MmapMut {
    let fd = nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, len as i64).unwrap();
    // SAFETY: the file is anonymous and nobody shortens it.
    unsafe { MmapMut::map_mut(&fd) }.unwrap()
}

fn call<R: Request>(request: &R) -> Result<R::Reply, u32> {
    call_in(CONTEXT, request)
}

fn call_in<R: Request>(context: u32, request: &R) -> Result<R::Reply, u32> {
    let (mut bytes, mut page) = ([0u8; 8192], [0u8; 1024]);
    let mut encoder = Encoder::new(&mut bytes);
    request.encode(&mut encoder).unwrap();
    let len = encoder.len();
    let (start, mut after) = (page.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the ranges are those of the two arrays.
    let code = unsafe {
        let (number, from, end) = (R::COMMAND.number(), bytes.as_ptr(), start.add(page.len()));
        apir_backend_dispatcher(context, &CALLBACKS, number, from, from.add(len), start, end, &mut after)
    };
    if code == 0 { Ok(R::Reply::decode(&mut Decoder::new(&page)).unwrap()) } else { Err(code) }
}

/// A node's tensors one behind the other, with guards, and the bytes that it writes; none when they are too large, or do not fit the wire.
///
/// With `lapping`, the first source that may lies so many bytes behind the start of what the result is written over.
fn lay_out(
    case: &Case,
    op: u32,
    buffer: BufferHandle,
    lapping: Option<u64>,
) -> Option<(Vec<TensorRecord>, Vec<Range<usize>>)> {
    let mut end = GUARD;
    let mut records = Vec::new();
    let mut record = |raw: &RawTensor, id: u64, at: Option<u64>| {
        let extent = apir_ggml::extent(raw.type_, raw.ne, raw.nb).ok()?;
        let data = at.unwrap_or(end);
        if at.is_none() {
            end = end.checked_add(extent)?.checked_add(GUARD)?.next_multiple_of(64);
        }
        let small = |values: [u64; 4]| values.iter().all(|value| *value <= u64::from(u32::MAX));
        if end > BUFFER as u64 || !small(raw.nb) || raw.ne.iter().any(|ne| !(0..1 << 31).contains(ne)) {
            return None;
        }
        let (ne, nb) = (raw.ne.map(|ne| ne as u32), raw.nb.map(|nb| nb as u32));
        let (type_, op_params, flags) = (raw.type_, raw.op_params, raw.flags);
        Some(TensorRecord { id, type_, buffer, ne, nb, data, op_params, flags, ..TensorRecord::default() })
    };
    let mut src = [0; 10];
    for (slot, source) in case.sources.iter().enumerate().take(10) {
        let Some(source) = source else { continue };
        src[slot] = slot as u64 + 1;
        records.push(record(source, src[slot], None)?);
    }
    if let (Some(over), Some(lapping)) = (case.over, lapping)
        && let Some(start) = records.iter().find(|record| record.id == over as u64 + 1).map(|over| over.data)
        && let Some(other) = records.iter_mut().find(|record| record.id != over as u64 + 1)
    {
        other.data = start + lapping;
        range_of(other)?;
    }
    let over = case.over.and_then(|slot| records.iter().find(|record| record.id == slot as u64 + 1)).copied();
    let mut node = record(&case.d, NODE, over.map(|over| over.data))?;
    (node.op, node.src, node.flags) = (op, src, node.flags | FLAG_COMPUTE);
    node.view_src = over.map_or(0, |over| over.id);
    if case.op == "VIEW" {
        node.data += u64::from(node.op_params[0] as u32);
        node.view_offs = u64::from(node.op_params[0] as u32);
    }
    if case.cast {
        // Its second source, laid out above, is nobody's.
        node.src[1] = node.id;
    }
    records.push(node);
    let writes = find(case.op).map_or(&[][..], |rule| rule.writes);
    let also = |record: &&TensorRecord| record.id == NODE || writes.contains(&(record.id as usize - 1));
    let mut written: Vec<_> = records.iter().filter(also).filter_map(range_of).collect();
    written.sort_by_key(|range| range.start);
    Some((records, written))
}

/// The bytes that a tensor spans, none for one beyond the buffer.
fn range_of(record: &TensorRecord) -> Option<Range<usize>> {
    let extent = apir_ggml::extent(record.type_, record.ne.map(i64::from), record.nb.map(u64::from)).ok()?;
    let end = record.data.checked_add(extent).filter(|end| *end <= BUFFER as u64)?;
    Some(record.data as usize..end as usize)
}

/// Fills a tensor: integers with ones, so that most indices are fit, everything else with numbers about one.
fn fill(record: &TensorRecord, memory: &mut [u8]) {
    let Some(range) = range_of(record) else { return };
    let bytes = &mut memory[range];
    // Strides that split elements may leave a part of one at the end.
    bytes.fill(0x3c);
    match record.type_ {
        F32 => {
            for (at, four) in bytes.chunks_exact_mut(4).enumerate() {
                four.copy_from_slice(&(1.0 + (at % 7) as f32 / 8.0).to_le_bytes());
            }
        }
        I32 => bytes.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&1i32.to_le_bytes())),
        I64 => bytes.chunks_exact_mut(8).for_each(|eight| eight.copy_from_slice(&1i64.to_le_bytes())),
        _ => {}
    }
}

/// What the host says to the question whether the device supports a node; none where the wire carries the question in parts.
fn is_supported(case: &Case, op: u32) -> Option<bool> {
    let carried = case.sources.iter().take_while(|source| source.is_some()).count();
    if carried < case.sources.len() {
        return None;
    }
    let mut sources: Vec<_> = case.sources.iter().copied().flatten().collect();
    let view_offs = if case.op == "VIEW" { u64::from(case.d.op_params[0] as u32) } else { 0 };
    let tensor = RawTensor { op, view_offs, ..case.d };
    if case.cast {
        sources[1] = tensor;
    }
    let view_src = case.over.map(|slot| sources[slot]);
    let node = InlineTensor { tensor, buffer: BufferHandle(0), view_src, sources };
    Some(call(&DeviceSupportsOpRequest { node }).is_ok_and(|reply| reply.supported))
}

/// The buffer of [`lay_out`], as the verifier knows it.
struct Laid;

impl Buffers for Laid {
    fn find(&self, token: u64) -> Option<BufferInfo> {
        (token == 1).then_some(BufferInfo { size: BUFFER as u64, alignment: 64, host: true, shared: true })
    }
}

#[test]
fn t28_a_question_and_a_graph_get_the_same_answer() {
    let (rules, cases) = (rules_for(true, 4), cases());
    let answers = std::cell::Cell::new([0; 2]);
    let changed = (0..cases.len(), any::<u64>(), 0..4usize, proptest::option::of(0..5u64));
    proptest!(ProptestConfig::with_cases(4096), |((at, seed, changes, lapping) in changed)| {
        let mut case = cases[at].clone();
        (0..changes).fold(Numbers::new(seed), |mut numbers, _| {
            change(&mut case, &mut numbers);
            numbers
        });
        // The wire does not tell a cast from a copy, where a view lies is known in a graph alone, and two nodes are made up for questions.
        let other = case.cast || VIEWS.contains(&case.op) || case.op == "RWKV_WKV6"
            || case.op.starts_with("ROPE") && case.d.op_params[1] == 0;
        let laid = lay_out(&case, op(case.op), BufferHandle(1), lapping.map(|steps| 64 * steps));
        let Some((records, _)) = laid.filter(|_| !other) else { return Ok(()) };
        let mut blob = vec![0; GRAPH];
        let used = encode_graph(&[NODE], &records, &mut blob).unwrap();
        let terms = Terms { rules: &rules, buffers: &Laid, index_check: IndexCheck::All, max_nodes: 100 };
        let graph = Verifier::default().verify(&blob[..used], &terms).map(|_| ()).map_err(|error| error.to_string());
        let question = case.with(|case| case.probe = true).check(&rules);
        prop_assert_eq!(question.is_ok(), graph.is_ok(), "{:?} {:?} {:?}", case, question, graph);
        let mut counts = answers.get();
        counts[usize::from(question.is_ok())] += 1;
        answers.set(counts);
    });
    assert!(answers.get().iter().all(|count| *count > 200), "{:?}", answers.get());
}

/// Whether contents decide that a node is refused: where the only fit index is 0, or there is none.
fn depends_on_contents(case: &Case) -> bool {
    let reads = find(case.op).map_or(&[][..], |rule| rule.reads);
    reads.iter().any(|read| matches!(read, Read::Index { .. }))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s25_nodes_are_computed_by_every_release() {
    let folder = std::env::var("APIR_GGML_RELEASES")
        .expect("APIR_GGML_RELEASES must name the folder of ggml's releases");
    let mut releases: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    releases.sort();
    assert!(releases.len() >= 4, "{releases:?}");
    for release in releases {
        // Two versions of ggml do not go into one process, and what a check misses ends it.
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["mutants::mutants_that_pass_touch_nothing_but_their_tensors", "--exact"]);
        child.arg("mutants::ggml_plans_every_kernel_as_its_rule_says");
        child.args(["--include-ignored", "--nocapture"]);
        child.env("APIR_LLAMA_DIR", &release).env("APIR_MUTANTS", "3");
        let output = child.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        let passed = output.status.success() && out.contains("2 passed");
        assert!(passed, "{}: {}\n{out}\n{err}", release.display(), output.status);
    }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn mutants_that_pass_touch_nothing_but_their_tensors() {
    let _alone = ONE_AT_A_TIME.lock();
    apir_guard::load();
    let path = std::path::Path::new(LIBRARY.to_str().unwrap());
    // SAFETY: the library is the one under test; it is only asked for its version and operations.
    let library = unsafe { GgmlLibrary::open(path, Some(REGISTRATION.to_str().unwrap())) }.unwrap();
    let (ops, version): (&OpTable, _) = (library.ops(), library.version());
    let rules = RuleBook::new(ops, version, true, 4);
    let rounds: usize = std::env::var("APIR_MUTANTS").map_or(40, |rounds| rounds.parse().unwrap());
    let (mut memory, mut graph) = (shared(BUFFER), shared(GRAPH));
    BLOBS[0].store(memory.as_mut_ptr() as usize, Ordering::Relaxed);
    BLOBS[1].store(graph.as_mut_ptr() as usize, Ordering::Relaxed);
    // SAFETY: the table is static.
    assert_eq!(unsafe { apir_backend_initialize(CONTEXT, &CALLBACKS) }, 6);
    let size = BUFFER as u64;
    let buffer = call(&DeviceBufferFromPtrRequest { res_id: 1, size, max_tensor_size: size }).unwrap().buffer;
    let mut expected = vec![0; BUFFER];
    let mut results = [Vec::new(), Vec::new()];
    let mut computed = BTreeMap::<&str, usize>::new();
    let (mut agreed, mut lapped) = (0, 0);
    for (at, case) in cases().iter().enumerate() {
        let Some(op) = ops.number(case.op) else { continue };
        let mut numbers = Numbers::new(at as u64);
        for round in 0..rounds {
            let mut mutant = case.clone();
            for _ in 0..round % 4 {
                change(&mut mutant, &mut numbers);
            }
            let lapping = (round % 3 == 2).then_some(64 * (round as u64 % 5));
            let Some((records, written)) = lay_out(&mutant, op, buffer, lapping) else { continue };
            let used = encode_graph(&[NODE], &records, &mut graph[..]).unwrap() as u64;
            if std::env::var_os("APIR_SHOW_MUTANTS").is_some() {
                eprintln!("{mutant:?}");
            }
            // What lies around the tensors is different each time, and makes no difference.
            for (around, result) in [0x40, 0x41].into_iter().zip(&mut results) {
                expected.fill(around);
                records.iter().for_each(|record| fill(record, &mut expected));
                memory.copy_from_slice(&expected);
                let outcome = call(&BackendGraphComputeRequest { res_id: 2, size: used });
                let done = outcome.map(|reply| reply.status) == Ok(0);
                if done {
                    *computed.entry(mutant.op).or_default() += 1;
                    lapped += usize::from(lapping.is_some() && mutant.over.is_some());
                }
                if round == 0 {
                    // What this release has is computed, and what it does not have is refused by the rules.
                    let admitted = mutant.check_for(&rules, op);
                    let widened = case.op == "MUL_MAT" && !done;
                    assert!(admitted.is_ok() == done || widened, "{version}: {admitted:?} {mutant:?}");
                }
                if let Some(supported) = is_supported(&mutant, op)
                    && (supported != done)
                {
                    assert!(
                        // Where a view lies is known in a graph alone.
                        supported && (depends_on_contents(&mutant) || VIEWS.contains(&mutant.op)),
                        "{version}: asked {supported}, computed {done}: {mutant:?} {lapping:?}"
                    );
                } else {
                    agreed += 1;
                }
                result.clear();
                let mut from = 0;
                for range in written.iter().cloned().chain(std::iter::once(BUFFER..BUFFER)) {
                    let gap = from..range.start.max(from);
                    assert!(memory[gap.clone()] == expected[gap.clone()], "{gap:?} changed by {mutant:?}");
                    result.extend_from_slice(&memory[range.clone()]);
                    from = from.max(range.end);
                }
            }
            assert!(
                results[0] == results[1],
                "what lies around the tensors shows in the result of {mutant:?}"
            );
        }
        assert!(
            computed.contains_key(case.op) || VIEWS.contains(&case.op) || case.check_for(&rules, op).is_err(),
            "{} was never computed",
            case.op
        );
    }
    assert!(agreed > 500 && lapped > 0, "{agreed} answers agree, {lapped} results lie over a source");
    apir_backend_deinit(CONTEXT);
    eprintln!("{} mutants computed twice: {computed:?}", computed.values().sum::<usize>() / 2);
}

const VIEWS: &[&str] = &["RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"];

/// Tensors of a sum whose rows all threads share out: ids, and where they lie, behind all others.
const SUM: u64 = 200;
const SUM_AT: u64 = BUFFER as u64 - (64 << 10);

fn add_sum(records: &mut Vec<TensorRecord>, op: u32, buffer: BufferHandle) {
    let ne = [32, 64, 1, 1];
    let nb = [4, 128, 8192, 8192];
    let tensor = |at: u64| {
        let (id, data) = (SUM + at, SUM_AT + at * 8192);
        TensorRecord { id, type_: F32, buffer, ne, nb, data, ..TensorRecord::default() }
    };
    let mut sum = TensorRecord { op, flags: FLAG_COMPUTE, ..tensor(2) };
    sum.src[..2].copy_from_slice(&[SUM, SUM + 1]);
    records.extend([tensor(0), tensor(1), sum]);
}

/// Makes indices rise, so that no two threads set the same row.
fn tell_apart(ids: &TensorRecord, memory: &mut [u8]) {
    let width = if ids.type_ == I64 { 8 } else { 4 };
    for (at, bytes) in memory[range_of(ids).unwrap()].chunks_exact_mut(width).enumerate() {
        bytes.fill(0);
        bytes[0] = at as u8;
    }
}

/// Whether two results are the same, floats as far as another order of summands goes.
fn same(type_: u32, found: &[u8], expected: &[u8]) -> bool {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    let near = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a - b).abs() <= 1e-3 * a.abs().max(b.abs());
    found == expected
        || type_ == F32 && floats(found).iter().zip(&floats(expected)).all(|(found, b)| near(found, b))
}

/// Contexts of 1, 2 and 4 threads over the two blobs.
struct Wide<'a> {
    library: GgmlLibrary,
    memory: &'a mut [u8],
    graph: &'a mut [u8],
    contexts: [(u32, u32, BufferHandle); 3],
}

impl<'a> Wide<'a> {
    fn new(memory: &'a mut MmapMut, graph: &'a mut MmapMut) -> Self {
        apir_guard::load();
        BLOBS[0].store(memory.as_mut_ptr() as usize, Ordering::Relaxed);
        BLOBS[1].store(graph.as_mut_ptr() as usize, Ordering::Relaxed);
        let contexts = [1, 2, 4].map(|threads| {
            let (context, size) = (WIDE_CONTEXT + threads, BUFFER as u64);
            // SAFETY: the table is static.
            assert_eq!(unsafe { apir_backend_initialize(context, &CALLBACKS) }, 6);
            let request = DeviceBufferFromPtrRequest { res_id: 1, size, max_tensor_size: size };
            (threads, context, call_in(context, &request).unwrap().buffer)
        });
        let path = std::path::Path::new(LIBRARY.to_str().unwrap());
        // SAFETY: the library is the one under test; it is only asked for its version and operations.
        let library = unsafe { GgmlLibrary::open(path, Some(REGISTRATION.to_str().unwrap())) }.unwrap();
        Self { library, memory, graph, contexts }
    }

    /// What a case's node writes in a graph with a sum, if the device has the node, and how many graphs had a guard.
    fn compute(
        &mut self,
        case: &Case,
        context: u32,
        buffer: BufferHandle,
        nodes: &[u64],
    ) -> Option<(Vec<Vec<u8>>, u64)> {
        let ops = self.library.ops();
        let (mut records, written) = lay_out(case, ops.number(case.op)?, buffer, None).unwrap();
        add_sum(&mut records, ops.number("ADD").unwrap(), buffer);
        self.memory.fill(0x40);
        records.iter().for_each(|record| fill(record, self.memory));
        if case.op == "SET_ROWS" {
            tell_apart(&records[1], self.memory);
        }
        let used = encode_graph(nodes, &records, self.graph).unwrap() as u64;
        let before = apir_guard::count();
        let reply = call_in(context, &BackendGraphComputeRequest { res_id: 2, size: used }).ok()?;
        assert_eq!(reply.status, 0, "{case:?}");
        let results = written.iter().map(|range| self.memory[range.clone()].to_vec()).collect();
        Some((results, apir_guard::count() - before))
    }
}

impl Drop for Wide<'_> {
    fn drop(&mut self) {
        for (_, context, _) in self.contexts {
            apir_backend_deinit(context);
        }
    }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s23_every_operation_is_what_it_is_alone_beside_a_node_of_more_threads() {
    let _alone = ONE_AT_A_TIME.lock();
    let (mut memory, mut graph) = (shared(BUFFER), shared(GRAPH));
    let mut wide = Wide::new(&mut memory, &mut graph);
    let mut seen = BTreeSet::new();
    for case in every_kernel() {
        let (_, context, buffer) = wide.contexts[0];
        // The device does not have all that the rules allow.
        let Some((expected, _)) = wide.compute(&case, context, buffer, &[NODE]) else { continue };
        for (threads, context, buffer) in wide.contexts {
            for nodes in [&[NODE, SUM + 2][..], &[SUM + 2, NODE]] {
                let (found, guarded) = wide.compute(&case, context, buffer, nodes).expect(case.op);
                let pairs = found.iter().zip(&expected);
                assert!(
                    pairs.into_iter().all(|(found, expected)| same(case.d.type_, found, expected)),
                    "{case:?} with {threads} threads"
                );
                if guarded > 0 {
                    seen.insert(case.op);
                }
            }
        }
    }
    let known = |rule: &&OpRule| wide.library.ops().number(rule.name).is_some();
    let with_work = FAMILIES.iter().flat_map(|(_, rules)| *rules).filter(|rule| rule.work.is_any());
    let missing: Vec<_> =
        with_work.filter(known).map(|rule| rule.name).filter(|name| !seen.contains(name)).collect();
    assert!(missing.is_empty(), "no work memory was seen of {missing:?}");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn ggml_plans_every_kernel_as_its_rule_says() {
    let _alone = ONE_AT_A_TIME.lock();
    let (mut memory, mut graph) = (shared(BUFFER), shared(GRAPH));
    let mut wide = Wide::new(&mut memory, &mut graph);
    for case in every_kernel() {
        let rule = find(case.op).unwrap();
        for (threads, context, buffer) in wide.contexts {
            if VIEWS.contains(&case.op) || wide.compute(&case, context, buffer, &[NODE]).is_none() {
                continue;
            }
            let (found, count) = (apir_guard::planned(), u64::from(threads));
            let model = |node: &Node<'_>| {
                let work = rule.work.planned(node, rule.tasks, count).unwrap();
                apir_guard::Planned { work, threads: rule.tasks.of(node, count) }
            };
            let (ops, version) = (wide.library.ops(), wide.library.version());
            let rules = RuleBook::new(ops, version, true, threads as usize);
            let said = case.look_as(ops.number(case.op).unwrap(), &rules, model).unwrap();
            // Tiles depend on the processor.
            let tiled = matches!(case.op, "MUL_MAT" | "MUL_MAT_ID");
            let fits = found.work == said.work || tiled && found.work < said.work;
            assert!(
                fits && found.threads == said.threads,
                "{version}: {found:?}, not {said:?}: {case:?}, {threads} threads"
            );
        }
    }
}
