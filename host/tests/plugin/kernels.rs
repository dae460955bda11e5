//! Nodes that break ggml's kernels: row S13 of the cases.

use crate::harness::*;
use apir_protocol::handle::BufferHandle;

/// Operation numbers of ggml 0.26.
mod op {
    pub(super) const CONCAT: u32 = 22;
    pub(super) const RMS_NORM: u32 = 25;
    pub(super) const MUL_MAT: u32 = 29;
    pub(super) const SCALE: u32 = 32;
    pub(super) const CPY: u32 = 34;
    pub(super) const CONT: u32 = 35;
    pub(super) const GET_ROWS: u32 = 40;
    pub(super) const SET_ROWS: u32 = 42;
    pub(super) const SOFT_MAX: u32 = 46;
    pub(super) const ROPE: u32 = 48;
    pub(super) const POOL_2D: u32 = 61;
    pub(super) const TOP_K: u32 = 70;
    pub(super) const FLASH_ATTN_EXT: u32 = 74;
    pub(super) const UNARY: u32 = 91;
    pub(super) const GLU: u32 = 100;
}

/// An honest scene of an operation whose kernel checks little, and changes to it that break the kernel.
type Broken = (fn(BufferHandle) -> Scene, &'static [fn(&mut Scene)]);

fn one() -> i32 {
    1.0f32.to_bits() as i32
}

const BROKEN: &[Broken] = &[
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (table, ids) = (scene.leaf(TYPE_F32, &[32, 9]), scene.leaf(TYPE_I32, &[3]));
            scene.node(op::GET_ROWS, TYPE_F32, &[32, 3], &[table, ids], &[]);
            scene
        },
        &[
            |s| s.get(3).ne = [32, 2, 1, 1],
            |s| (s.get(3).ne, s.get(3).nb) = ([16, 3, 1, 1], [4, 64, 192, 192]),
            |s| s.get(2).type_ = TYPE_I64,
            |s| s.get(2).ne = [3, 2, 1, 1],
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let rows = scene.leaf(TYPE_F32, &[32, 3]);
            let ids = scene.leaf(TYPE_I64, &[3]);
            let target = scene.leaf(TYPE_F16, &[32, 9]);
            scene.over(op::SET_ROWS, target, &[rows, ids, target], &[]);
            scene
        },
        &[
            |s| (s.get(1).ne, s.get(1).nb) = ([64, 3, 1, 1], [4, 256, 768, 768]),
            |s| s.get(1).ne = [32, 4, 1, 1],
            |s| s.get(2).ne = [2, 1, 1, 1],
            |s| s.get(4).src[2] = 0,
            |s| s.get(4).data += 64,
            |s| (s.get(4).view_src, s.get(4).data) = (0, 4096),
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (blocks, target) = (scene.leaf(TYPE_Q8_0, &[64, 4]), scene.leaf(TYPE_F32, &[64, 4]));
            scene.over(op::CPY, target, &[blocks, target], &[]);
            scene
        },
        &[
            |s| s.get(2).nb[1] = 512,
            |s| s.get(3).src[1] = 0,
            |s| s.get(3).src[1] = 1,
            |s| (s.get(2).ne, s.get(3).ne) = ([64, 5, 1, 1], [64, 5, 1, 1]),
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let blocks = scene.leaf(TYPE_Q8_0, &[64, 4]);
            scene.node(op::CONT, TYPE_Q8_0, &[64, 4], &[blocks], &[]);
            scene
        },
        &[|s| {
            s.get(1).nb = [34, 136, 544, 544];
            (s.get(2).ne, s.get(2).nb) = ([32, 8, 1, 1], [34, 34, 272, 272]);
        }],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (a, b) = (scene.leaf(TYPE_Q8_0, &[64, 8]), scene.leaf(TYPE_F32, &[64, 3]));
            scene.node(op::MUL_MAT, TYPE_F32, &[8, 3], &[a, b], &[]);
            scene
        },
        &[
            |s| (s.get(1).ne, s.get(1).nb) = ([128, 8, 1, 1], [34, 136, 1088, 1088]),
            |s| s.get(3).ne = [8, 2, 1, 1],
            |s| s.get(1).ne[2] = 0,
            |s| s.get(3).op_params[1] = 1,
            |s| s.get(3).src[1] = 0,
            |s| s.get(1).type_ = 9,
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (a, mask) = (scene.leaf(TYPE_F32, &[32, 4, 2]), scene.leaf(TYPE_F16, &[32, 4]));
            scene.node(op::SOFT_MAX, TYPE_F32, &[32, 4, 2], &[a, mask], &[one()]);
            scene
        },
        &[
            |s| s.get(2).ne = [32, 3, 1, 1],
            |s| s.get(2).ne[2] = 0,
            |s| (s.get(3).ne, s.get(3).nb) = ([16, 8, 2, 1], [4, 64, 512, 1024]),
            |s| (s.get(3).src[1], s.get(3).op_params[1]) = (0, one()),
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (a, positions) = (scene.leaf(TYPE_F32, &[32, 2, 5]), scene.leaf(TYPE_I32, &[5]));
            scene.node(op::ROPE, TYPE_F32, &[32, 2, 5], &[a, positions], &[0, 32, 0, 0, 0, one(), one()]);
            scene
        },
        &[
            |s| s.get(3).op_params[1] = 0,
            |s| s.get(3).op_params[1] = -2,
            |s| s.get(2).ne[0] = 4,
            |s| s.get(3).op_params[2] = 8,
            |s| s.get(3).op_params[2] = 6,
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[10, 8, 3]);
            scene.node(op::POOL_2D, TYPE_F32, &[5, 4, 3], &[a], &[0, 2, 2, 2, 2, 0, 0]);
            scene
        },
        &[
            |s| s.get(2).op_params[0] = 2,
            |s| s.get(2).op_params[1] = i32::MAX,
            |s| s.get(2).op_params[3] = 0,
            |s| s.get(1).nb[2] = 4,
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[16, 3]);
            scene.node(op::TOP_K, TYPE_I32, &[4, 3], &[a], &[]);
            scene
        },
        &[|s| (s.get(2).ne, s.get(2).nb) = ([17, 3, 1, 1], [4, 68, 204, 204])],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let q = scene.leaf(TYPE_F32, &[32, 3, 4]);
            let (k, v) = (scene.leaf(TYPE_F16, &[32, 7, 2]), scene.leaf(TYPE_F16, &[32, 7, 2]));
            let mask = scene.leaf(TYPE_F16, &[7, 3]);
            scene.node(op::FLASH_ATTN_EXT, TYPE_F32, &[32, 4, 3], &[q, k, v, mask], &[one()]);
            scene
        },
        &[
            |s| s.get(3).ne[1] = 6,
            |s| s.get(4).ne[0] = 6,
            |s| s.get(4).ne[1] = 2,
            |s| s.get(2).ne[2] = 0,
            |s| s.get(3).ne[2] = 3,
            |s| s.get(2).type_ = TYPE_I32,
            |s| s.get(5).nb[1] = 256,
            |s| s.get(5).op_params[3] = 15,
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[32, 3]);
            scene.node(op::UNARY, TYPE_F32, &[32, 3], &[a], &[10]);
            scene
        },
        &[|s| s.get(2).type_ = TYPE_F16, |s| s.get(2).op_params[0] = 22, |s| s.get(2).ne[1] = 2],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[32, 3]);
            scene.node(op::GLU, TYPE_F32, &[16, 3], &[a], &[2]);
            scene
        },
        &[|s| s.get(2).type_ = TYPE_F16, |s| s.get(2).op_params[0] = 9, |s| s.get(2).ne[0] = 32],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let (a, b) = (scene.leaf(TYPE_F32, &[8, 3]), scene.leaf(TYPE_F32, &[8, 2]));
            scene.node(op::CONCAT, TYPE_F32, &[8, 5], &[a, b], &[1]);
            scene
        },
        &[|s| s.get(3).op_params[0] = 4, |s| s.get(3).ne[1] = 6, |s| s.get(3).op_params[0] = -1],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[32, 3]);
            scene.node(op::RMS_NORM, TYPE_F32, &[32, 3], &[a], &[one()]);
            scene
        },
        &[
            |s| s.get(2).type_ = TYPE_F16,
            |s| s.get(2).op_params[0] = (-1.0f32).to_bits() as i32,
            |s| s.get(2).op_params[0] = f32::NAN.to_bits() as i32,
        ],
    ),
    (
        |buffer| {
            let mut scene = Scene::new(buffer);
            let a = scene.leaf(TYPE_F32, &[32, 3]);
            scene.node(op::SCALE, TYPE_F32, &[32, 3], &[a], &[one()]);
            scene
        },
        &[|s| s.get(1).nb[1] = 512, |s| s.get(2).ne[1] = 2, |s| s.get(2).op_params[7] = 1],
    ),
];

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s13_shapes_that_kernels_only_assert_are_refused() {
    in_child("kernels::s13_shapes_that_kernels_only_assert_are_refused", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(64 << 10);
        for (honest, changes) in BROKEN {
            let op = honest(buffer).tensors.iter().find(|tensor| tensor.op != 0).unwrap().op;
            assert_eq!(honest(buffer).compute(&mut guest), Ok(0), "operation {op}");
            for (at, change) in changes.iter().enumerate() {
                let mut scene = honest(buffer);
                change(&mut scene);
                assert_eq!(scene.compute(&mut guest), Err(1), "operation {op}, change {at}");
            }
        }
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn strides_of_one_element_may_hold_anything() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(64 << 10);
    for stride in [0, 3, u32::MAX] {
        let mut scale = Scene::new(buffer);
        let a = scale.leaf(TYPE_F32, &[32]);
        scale.node(op::SCALE, TYPE_F32, &[32], &[a], &[one()]);
        scale.get(a).nb[1..].fill(stride);
        assert_eq!(scale.compute(&mut guest), Ok(0), "a wild stride of rows");
        let mut pool = Scene::new(buffer);
        let a = pool.leaf(TYPE_F32, &[10, 8]);
        pool.node(op::POOL_2D, TYPE_F32, &[5, 4], &[a], &[0, 2, 2, 2, 2, 0, 0]);
        pool.get(a).nb[2..].fill(stride);
        assert_eq!(pool.compute(&mut guest), Ok(0), "a wild stride of planes");
    }
}
