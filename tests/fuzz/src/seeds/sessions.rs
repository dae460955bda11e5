//! Sessions: an honest one, and those that break one rule after honest steps.
#![forbid(unsafe_code)]

use super::{Seeds, graphs};
use crate::input::Input;
use crate::session::{Blob, Call, GraphBytes, Handle, Inline, Plain, Session, Size, Step, Tensor, Transfer};

const F32: u8 = 0;

fn row(n: u32) -> Tensor {
    Tensor { buffer: Handle::Live(0), type_: F32, ne: [n, 1, 1, 1], nb: None, data: Size::Small(0) }
}

fn moved(n: u32) -> Transfer {
    Transfer {
        buffer: Handle::Live(0),
        tensor: row(n),
        blob: Blob::Live(0),
        offset: Size::Small(0),
        size: Size::Small(n as u16 * 4),
    }
}

fn inline() -> Box<Inline> {
    let plain = Plain { type_: F32, ne: [4, 1, 1, 1], nb: None };
    Box::new(Inline {
        op: 9,
        params: Vec::new(),
        tensor: plain.clone(),
        buffer: Handle::Raw(0x7fff_1234_5678),
        view: None,
        sources: vec![plain],
    })
}

/// A node outside a graph with all that it may have, as bytes.
pub(super) fn inline_bytes() -> Vec<u8> {
    use apir_protocol::handle::BufferHandle;
    use apir_protocol::tensor::{InlineTensor, RawTensor};
    let raw = RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
    let node = InlineTensor {
        tensor: RawTensor { op: 2, ..raw },
        buffer: BufferHandle(7),
        view_src: Some(raw),
        sources: vec![raw, raw],
    };
    crate::guest::encode(&node)
}

fn graph(name: &str) -> Step {
    Step::MakeGraph(GraphBytes(graphs::hostile().remove(name).unwrap_or_default()))
}

/// What `cargo run --example record` wrote of test-backend-ops: sums and products, from the first question to buffers that are given back.
const RECORDED: [(&str, &[u8]); 2] = [
    ("recorded_add", include_bytes!("../../recorded/session-add")),
    ("recorded_mul_mat", include_bytes!("../../recorded/session-mul-mat")),
];

/// Every command once, as an honest guest sends it.
fn every_call() -> Vec<Call> {
    let fitting = Size::Fitting;
    vec![
        Call::GetDeviceCount,
        Call::GetCount,
        Call::GetName,
        Call::GetDescription,
        Call::GetType,
        Call::GetMemory,
        Call::SupportsOp(inline()),
        Call::GetBufferType,
        Call::GetProps,
        Call::BufferFromPtr { blob: Blob::Live(0), size: fitting, max_tensor_size: fitting },
        Call::TypeName(Handle::Type),
        Call::TypeAlignment(Handle::Type),
        Call::TypeMaxSize(Handle::Type),
        Call::TypeIsHost(Handle::Type),
        Call::Alloc(Handle::Type, Size::Small(64)),
        Call::AllocSize(Handle::Type, inline()),
        Call::GetBase(Handle::Live(0)),
        Call::Set(moved(16)),
        Call::Get(moved(16)),
        Call::Copy { buffer: Handle::Live(0), from: row(4), to: Tensor { data: Size::Small(64), ..row(4) } },
        Call::Clear(Handle::Live(0), 1),
        Call::Free(Handle::Live(1)),
        Call::Compute(Blob::Live(1), fitting),
        Call::Hello(u64::MAX),
        Call::Liveness(Blob::Live(0), fitting),
    ]
}

/// The stored sessions by name.
pub(super) fn all() -> Seeds {
    let mut seeds = Seeds::new();
    let mut add = |name: &str, steps: Vec<Step>| {
        // A buffer of 65,536 bytes, where the graphs lie; a blob of a page.
        let start = [
            Step::Call(Call::Alloc(Handle::Type, Size::Raw(1 << 16))),
            Step::Call(Call::Free(Handle::Live(0))),
            Step::MakeBlob(0, 7),
        ];
        let steps = start.into_iter().chain(steps).map(|step| (0, step)).collect();
        seeds.insert(name.to_owned(), Session { steps }.store());
    };
    let honest = || [graph("honest_square")].into_iter().chain(every_call().into_iter().map(Step::Call));
    add("honest", honest().collect());
    let calls = |calls: Vec<Call>| calls.into_iter().map(Step::Call).collect::<Vec<_>>();
    transfers(&mut |name, call| add(name, calls(call)));

    let wrong = [Handle::Raw(0), Handle::Raw(u64::MAX), Handle::Raw(0x7fff_dead_beef), Handle::Others(0)];
    for (at, handle) in
        wrong.into_iter().chain([Handle::Type, Handle::OthersType, Handle::Stale(0)]).enumerate()
    {
        let each = [
            Call::GetBase(handle),
            Call::Clear(handle, 1),
            Call::Free(handle),
            Call::Set(Transfer { buffer: handle, ..moved(16) }),
        ];
        add(&format!("s07_handle_{at}"), calls(each.to_vec()));
    }
    for (at, handle) in wrong.into_iter().chain([Handle::OthersType, Handle::Live(0)]).enumerate() {
        let each = [
            Call::TypeName(handle),
            Call::TypeAlignment(handle),
            Call::TypeMaxSize(handle),
            Call::Alloc(handle, Size::Small(64)),
            Call::AllocSize(handle, inline()),
        ];
        add(&format!("s17_type_{at}"), calls(each.to_vec()));
    }
    let told = wrong.map(Call::GetBase);
    add("reasons", calls([&[Call::Hello(u64::MAX)], &told[..]].concat()));
    let compute = || Step::Call(Call::Compute(Blob::Live(1), Size::Fitting));
    add(
        "s11_freed",
        vec![graph("honest_square"), compute(), Step::Call(Call::Free(Handle::Live(0))), compute()],
    );
    for (name, offset) in [("count", 0), ("type", 24), ("dimension", 40), ("source", 448)] {
        let steps = vec![
            graph("honest_square"),
            Step::Scribble(1, offset),
            compute(),
            compute(),
            compute(),
            compute(),
        ];
        add(&format!("s15_{name}"), steps);
    }
    let too_small = |size| Step::Call(Call::Compute(Blob::Live(1), size));
    add(
        "s18_short",
        vec![graph("honest_square"), too_small(Size::Raw(4097)), too_small(Size::Raw(u64::MAX))],
    );
    let shared = |size| Call::BufferFromPtr { blob: Blob::Live(0), size, max_tensor_size: Size::Fitting };
    add(
        "s18_shared",
        calls(vec![shared(Size::Raw(4097)), shared(Size::Raw(0)), shared(Size::Raw(u64::MAX))]),
    );
    add(
        "s18_unknown",
        calls(vec![
            Call::Compute(Blob::Raw(999), Size::Small(640)),
            Call::Liveness(Blob::Raw(999), Size::Small(0)),
            Call::Liveness(Blob::Live(0), Size::Small(2)),
            Call::Liveness(Blob::Live(0), Size::Raw(u64::MAX)),
            Call::Get(Transfer { blob: Blob::Raw(999), ..moved(4) }),
        ]),
    );
    let shared =
        [Step::Call(shared(Size::Fitting)), Step::DropBlob(0), Step::Call(Call::Clear(Handle::Live(1), 3))];
    add("s18_dropped", [&shared[..], &[Step::Call(Call::Free(Handle::Live(1)))]].concat());
    let cut = every_call().into_iter().enumerate().map(|(at, call)| Step::Cut(call, at as u8 * 10));
    add("s19_cut", cut.collect());
    let more = every_call().into_iter().map(|call| Step::Trailing(call, vec![0xff; 9]));
    add("s19_trailing", [graph("honest_square")].into_iter().chain(more).collect());
    let stopped = every_call().into_iter().map(Step::Call);
    add("s20_stopped", [Step::Stop].into_iter().chain(stopped).collect());
    add(
        "s20_twice",
        vec![Step::Start, Step::Stop, Step::Stop, Step::Start, Step::Call(Call::GetBase(Handle::Stale(0)))],
    );
    add("s20_unknown", [23, 1024, u32::MAX].map(|number| Step::Raw(number, vec![0; 16])).to_vec());
    add("s22_fresh", calls(vec![Call::Get(moved(1024))]));
    seeds.extend(RECORDED.map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    seeds
}

/// Bytes to and from where there are none.
fn transfers(add: &mut impl FnMut(&str, Vec<Call>)) {
    let with = |change: fn(&mut Transfer)| {
        let mut transfer = moved(16);
        change(&mut transfer);
        vec![Call::Set(transfer.clone()), Call::Get(transfer)]
    };
    add("s01_removed", with(|transfer| transfer.tensor.type_ = 4));
    add("s01_past_the_table", with(|transfer| transfer.tensor.type_ = 99));
    add(
        "s02_s03_absolute",
        with(|transfer| {
            (transfer.tensor.buffer, transfer.tensor.data) = (Handle::Raw(0), Size::Raw(0x7fff_0000_1000));
        }),
    );
    add(
        "s04_wrapping",
        with(|transfer| (transfer.offset, transfer.size) = (Size::Raw(u64::MAX - 3), Size::Small(8))),
    );
    add("s04_past_the_tensor", with(|transfer| transfer.offset = Size::Small(4)));
    add("s04_past_the_buffer", with(|transfer| transfer.tensor.data = Size::Raw(65_500)));
    add(
        "s04_past_the_blob",
        with(|transfer| {
            transfer.tensor.ne[0] = 4096;
            transfer.size = Size::Small(4096 * 4);
        }),
    );
    add("s04_everything", with(|transfer| transfer.size = Size::Raw(u64::MAX)));
    add("s09_negative", with(|transfer| transfer.tensor.ne = [u32::MAX; 4]));
    let copy = |change: fn(&mut Tensor)| {
        let mut to = Tensor { data: Size::Small(1024), ..row(16) };
        change(&mut to);
        vec![Call::Copy { buffer: Handle::Live(0), from: row(16), to }]
    };
    add("s05_size", copy(|to| to.ne[0] = 8));
    add("s05_type", copy(|to| to.type_ = 26));
    add("s05_strides", copy(|to| to.nb = Some([8, 128, 128, 128])));
    add("s05_no_buffer", copy(|to| to.buffer = Handle::Raw(0)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Graph;

    #[test]
    fn recorded_sessions_compute_and_give_their_buffers_back() {
        for (name, bytes) in RECORDED {
            let steps: Vec<Step> =
                Session::of(bytes).unwrap().steps.into_iter().map(|(_, step)| step).collect();
            let computed =
                steps.iter().position(|step| matches!(step, Step::Call(Call::Compute(..)))).expect(name);
            let graph = steps[..computed].iter().rev().find_map(|step| match step {
                Step::MakeGraph(bytes) => Graph::from_blob(&bytes.0),
                _ => None,
            });
            let placed = |graph: &Graph| graph.tensors.iter().all(|tensor| tensor.buffer.0 > 1);
            assert!(graph.as_ref().is_some_and(placed), "{name}: {graph:?}");
            assert!(steps[computed..].iter().any(|step| matches!(step, Step::Call(Call::Free(_)))), "{name}");
        }
    }
}
