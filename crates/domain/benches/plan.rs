//! `plan()` over whole fleets. The bar: 1,000 nodes × 10,000 models in 10 ms, growing near-linearly.
//!
//! `rest`: every model has its copy on disk, one in ten serves; nothing is to do. `wakes`: beside that, one model in a
//! hundred has just been woken, so every node is ranked for each. `one`: one woken model alone, which is what a
//! cold request costs.

use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use pilotlight_domain::plan::{plan, plan_some};
use pilotlight_domain::replica::Replica;
use pilotlight_domain::view::{
    Content, Device, DeviceFacts, Hold, ModelFacts, NodeFacts, Placed, ResidentFacts, Size, TierFacts, View,
};
use pilotlight_domain::{Bandwidth, ByteCount, Generation, ModelName, NodeName, Tier, Timestamp};

const NOW: Timestamp = Timestamp::from_micros(1_000_000_000_000);

fn model(i: usize) -> ModelName {
    ModelName::new("default", &format!("model-{i:05}")).expect("a good name")
}

fn node(i: usize) -> NodeName {
    format!("node-{i:04}").parse().expect("a good name")
}

fn fleet(nodes: usize, models: usize) -> View {
    let mut view = View::default();
    let tier = |gib, rate: f64| TierFacts {
        capacity: ByteCount::from_gib(gib),
        bandwidth: Some(Bandwidth::bytes_per_second(rate)),
        queued: ByteCount::ZERO,
    };
    for n in 0..nodes {
        let residents = (n..models).step_by(nodes).map(|i| ResidentFacts {
            digest: format!("sha256:{i:064x}"),
            source_uri: format!("hf://org/model-{i:05}"),
            tier: Tier::Disk,
        });
        let facts = NodeFacts {
            disk: tier(2000, 2e8),
            host: tier(256, 1e9 + n as f64),
            devices: vec![DeviceFacts {
                kind: Device::Cpu,
                product: "cpu".into(),
                memory: ByteCount::ZERO,
                ready_in: Duration::ZERO,
                usable: true,
                prefill_rate: Some(200.0),
            }],
            residents: residents.collect(),
            ..NodeFacts::default()
        };
        view.put_node(&node(n), facts);
    }
    for i in 0..models {
        let content = Arc::new(Content {
            uid: format!("uid-{i}"),
            source_uri: format!("hf://org/model-{i:05}"),
            ..Content::default()
        });
        let facts = ModelFacts {
            content: content.clone(),
            size: Some(Size { bytes: ByteCount::from_gib(2), files: 1 }),
            digest: format!("sha256:{i:064x}"),
            ..ModelFacts::default()
        };
        view.put_model(&model(i), facts);
        let serves = i % 10 == 0;
        let placed = Placed {
            hold: if serves { Hold::Serve(Device::Cpu) } else { Hold::Disk },
            generation: Generation(1),
            content,
            state: Replica::Ready,
            since: NOW,
            failures: 0,
            slots: 8,
        };
        view.put_replica(&model(i), &node(i % nodes), placed);
        if serves {
            view.change_demand(&model(i), |demand| demand.set(1, 0, None, NOW, Duration::from_secs(60)));
        }
    }
    view
}

fn wake(view: &mut View, i: usize) {
    view.change_demand(&model(i), |demand| demand.set(0, 1, None, NOW, Duration::from_secs(60)));
}

fn plans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(20).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    for (nodes, models) in [(100, 1_000), (500, 5_000), (1_000, 10_000)] {
        let rest = fleet(nodes, models);
        assert!(plan(&rest, NOW).is_empty());
        group.bench_function(format!("rest/{nodes}x{models}"), |b| b.iter(|| plan(&rest, NOW)));
        let mut woken = rest.clone();
        (0..models).step_by(100).for_each(|i| wake(&mut woken, i + 1));
        assert_eq!(plan(&woken, NOW).steps.len(), models / 100);
        group.bench_function(format!("wakes/{nodes}x{models}"), |b| b.iter(|| plan(&woken, NOW)));
        let mut one = rest.clone();
        wake(&mut one, 1);
        let name = model(1);
        group.bench_function(format!("one/{nodes}x{models}"), |b| {
            b.iter_batched(|| (), |()| plan_some(&one, [&name], NOW), BatchSize::SmallInput);
        });
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
