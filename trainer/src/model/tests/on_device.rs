//! Compares the model on a device (with the kernels on the CPU) with plain libtorch and with the model on the CPU.

use super::*;
use crate::device::Accelerator;
use crate::device::tests::host::emulated;

pub(super) fn on_device(config: &TrainConfig) -> Model {
    at(config, &tables(), Some(&emulated()))
}

fn at(config: &TrainConfig, tables: &[FeatureConfig], device: Option<&Accelerator>) -> Model {
    let (optimizer, seed) = (&config.optimizer.tables, config.train.seed);
    let embeddings = match device {
        None => Embeddings::new(tables, &Placement::alone(tables), optimizer, seed, 2),
        Some(device) => {
            Embeddings::on_accelerator(device, tables, &Placement::alone(tables), optimizer, seed, 2)
        }
    };
    Model::new(config, &schema(), embeddings.unwrap()).unwrap()
}

/// Returns tables with alternating types, so that every kind of pooling occurs with several types.
fn narrow_tables() -> Vec<FeatureConfig> {
    let dtypes = [DataType::Bf16, DataType::Fp16, DataType::Fp32].into_iter().cycle();
    tables().into_iter().zip(dtypes).map(|(table, dtype)| FeatureConfig { dtype, ..table }).collect()
}

/// Returns a batch in the forms off, exact and window.
fn forms_of(plain: &Batch) -> [(&'static str, Batch); 3] {
    [("off", plain.clone()), ("exact", deduplicated(plain, false)), ("window", deduplicated(plain, true))]
}

fn dcn() -> TrainConfig {
    let mut config = config("sgd");
    config.model.interaction = Interaction::Dcn;
    (config.model.dcn_num_layers, config.model.dcn_low_rank_dim) = (2, 5);
    config
}

#[test]
fn loss_and_gradients_equal_plain_libtorch() {
    for (config, features) in [(config("sgd"), tables()), (config("sgd"), shared_tables()), (dcn(), tables())]
    {
        let plain = batch(1);
        for (name, batch) in forms_of(&plain) {
            let mut model = at(&config, &features, Some(&emulated()));
            let before = weights(&model);
            let leaves: Vec<Tensor> = before.iter().map(|w| w.copy().set_requires_grad(true)).collect();
            let expected = plain_loss(&model, &leaves, &plain);
            expected.backward();
            let named = model.named_dense_parameters();
            let expected_gradients: Vec<Tensor> = named.values().map(|p| p.grad().copy()).collect();
            named.values().for_each(|p| drop(p.grad().zero_()));

            let mut forward = model.predict(&batch).unwrap();
            let loss = model.loss(&forward, &batch, Model::weight(&batch));
            assert_near(name, &loss, &expected);
            model.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
            for ((parameter, value), expected) in named.iter().zip(&expected_gradients) {
                assert_near(&format!("{name}, {parameter}"), &value.grad(), expected);
            }
            model.update(forward, &config.optimizer.tables).unwrap();
            for ((table, (before, after)), leaf) in
                tables_of(&features).0.iter().zip(before.iter().zip(weights(&model))).zip(&leaves)
            {
                assert_near(&format!("{name}, {}", table.name), &(before - after), &leaf.grad());
            }
        }
    }
}

/// Returns the losses of `steps` steps, and the contents of the tables' buffers in checkpoints.
fn train(config: &TrainConfig, model: &mut Model, form: usize, steps: u64) -> (Vec<f64>, Vec<Vec<u8>>) {
    let batches: Vec<Batch> =
        (0..steps).map(|i| forms_of(&batch(i % 6)).into_iter().nth(form).unwrap().1).collect();
    let mut optimizer = DenseOptimizer::of(model, &config.optimizer.dense, 1).unwrap();
    let mut losses = Vec::new();
    let mut input = Some(model.request(batches.first(), Status::default()).unwrap());
    for (i, batch) in batches.iter().enumerate() {
        let (mut forward, loss) = model.learn(batch, input.take().unwrap(), Model::weight(batch)).unwrap();
        model.backward(batch, &mut forward, &loss, || Ok(())).unwrap();
        if let Some(next) = batches.get(i + 1) {
            input = Some(model.request(Some(next), Status::default()).unwrap());
        }
        let norm = optimizer.judge(None, None).unwrap();
        optimizer.step(config.optimizer.dense.learning_rate, &norm).unwrap();
        model.update(forward, &config.optimizer.tables).unwrap();
        losses.push(loss.double_value(&[]));
    }
    (losses, stored(model))
}

/// Takes a few steps, with every way of pooling and every form of a batch.
pub(crate) fn take_steps(device: &Accelerator) {
    for (form, kind) in ["row_wise_adagrad", "adagrad", "adam"].into_iter().enumerate() {
        let config = config(kind);
        train(&config, &mut at(&config, &narrow_tables(), Some(device)), form, 2);
    }
}

/// Returns the contents of the tables' buffers in checkpoints.
fn stored(model: &Model) -> Vec<Vec<u8>> {
    let embeddings = &model.embeddings;
    let mut all = Vec::new();
    for shard in 0..embeddings.shards().len() {
        for buffer in 0..embeddings.buffers(shard).len() {
            let mut bytes = Vec::new();
            let mut sink = |piece: &[u8]| {
                bytes.extend_from_slice(piece);
                Ok(())
            };
            embeddings.read(shard, buffer, RowSet::All, &mut sink).unwrap();
            all.push(bytes);
        }
    }
    all
}

#[test]
fn training_equals_the_cpus_and_itself() {
    train_as_the_cpu(&tables());
}

#[test]
fn shared_tables_train_as_the_cpus() {
    train_as_the_cpu(&shared_tables());
}

/// Steps of a training: every batch more than twice, and most of them as recorded graphs.
const STEPS: u64 = 16;

fn train_as_the_cpu(features: &[FeatureConfig]) {
    let on_device = |config: &TrainConfig| at(config, features, Some(&emulated()));
    for kind in ["row_wise_adagrad", "adagrad", "adam", "sgd"] {
        let mut config = config(kind);
        config.optimizer.tables.learning_rate = 0.05;
        for (form, (name, _)) in forms_of(&batch(0)).iter().enumerate() {
            let mut cpu = at(&config, features, None);
            let (expected, _) = train(&config, &mut cpu, form, STEPS);
            let (losses, state) = train(&config, &mut on_device(&config), form, STEPS);
            for (step, (a, b)) in expected.iter().zip(&losses).enumerate() {
                let close = (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
                assert!(close, "{kind}, {name}, step {step}: {a} {b}");
            }
            // A second run: threads run in another order, but all bits are equal.
            let (again, same) = train(&config, &mut on_device(&config), form, STEPS);
            assert!(losses == again && state == same, "{kind}, {name}");
        }
    }
}

/// From the third step on, the dense part is a graph, with any sample weights. Batches of another size run without
/// a graph until they have a graph of their own.
#[test]
fn graphs_compute_what_was_recorded() {
    let mut config = config("adagrad");
    config.data.label = None;
    let task =
        |label: &str, weight| crate::config::TaskConfig { weight, ..crate::config::TaskConfig::new(label) };
    (config.tasks, config.model.top_mlp) = (vec![task("label", 1.0), task("like", 0.5)], vec![12, 2]);
    let batch = |step: usize| {
        let plain = batch(step as u64);
        let weights: Vec<f32> = (0..plain.size()).map(|sample| ((sample + step) % 4) as f32).collect();
        Batch::try_new(BatchParts { weights: Some(weights.into()), ..plain.into_parts() }).unwrap()
    };
    let mut models = [on_device(&config), on_device(&config)];
    let mut optimizers =
        models.each_ref().map(|model| DenseOptimizer::of(model, &config.optimizer.dense, 1).unwrap());
    for step in 0..6 {
        let batch = deduplicated(&batch(step), true);
        let weight = Model::weight(&batch);
        let input = models[0].request(Some(&batch), Status::default()).unwrap();
        let by_graph = models[0].learn(&batch, input, weight).unwrap();
        let forward = models[1].predict(&batch).unwrap();
        let loss = models[1].loss(&forward, &batch, weight);
        assert_eq!((by_graph.1.requires_grad(), loss.requires_grad()), (step < 2, true), "step {step}");
        let passes = [by_graph, (forward, loss)];
        let losses = passes.each_ref().map(|(_, loss)| loss.double_value(&[]));
        assert!((losses[0] - losses[1]).abs() <= 1e-6 * losses[1], "step {step}: {losses:?}");
        for ((model, optimizer), (mut forward, loss)) in models.iter_mut().zip(&mut optimizers).zip(passes) {
            model.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
            let norm = optimizer.judge(None, None).unwrap();
            optimizer.step(config.optimizer.dense.learning_rate, &norm).unwrap();
            model.update(forward, &config.optimizer.tables).unwrap();
        }
    }
    let [by_graph, computed] = models.each_ref().map(Model::named_dense_parameters);
    for ((name, a), b) in by_graph.iter().zip(computed.values()) {
        assert_near(name, a, b);
    }
}

/// With 16-bit weights and clipped gradients, noise and limits are the same as on the CPU, so losses differ only by
/// rounding. If an update differs in its last bit before rounding, the stored weight rarely differs by a step of
/// its type.
#[test]
fn narrow_tables_and_clipped_gradients_train_as_the_cpus() {
    let tables = narrow_tables();
    for kind in ["row_wise_adagrad", "adagrad", "adam", "sgd"] {
        let mut config = config(kind);
        config.optimizer.tables.learning_rate = 0.02;
        // Gradients that consist of rounding errors must not become whole steps.
        config.optimizer.tables.eps = 1e-2;
        let model = |config: &TrainConfig, device: Option<&Accelerator>| at(config, &tables, device);
        let device = Some(emulated());
        let (_, unlimited) = train(&config, &mut model(&config, device.as_ref()), 2, 16);
        config.optimizer.tables.max_row_grad_norm = Some(0.01);
        let (expected, cpu) = train(&config, &mut model(&config, None), 2, 16);
        let (losses, stored) = train(&config, &mut model(&config, device.as_ref()), 2, 16);
        for (step, (a, b)) in expected.iter().zip(&losses).enumerate() {
            let close = (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
            assert!(close, "{kind}, step {step}: {a} {b}");
        }
        assert!(unlimited != stored, "{kind}: nothing was clipped");
        // `stored` contains the weights and the state of each table in turn.
        for (table, (cpu, device)) in tables.iter().zip(cpu.iter().zip(&stored).step_by(2)) {
            if table.dtype != DataType::Fp32 {
                let different = cpu.chunks(2).zip(device.chunks(2)).filter(|(a, b)| a != b).count();
                let weights = (ROWS * DIM) as usize;
                assert!(different * 20 <= weights, "{kind}, {}: {different} of {weights}", table.feature);
            }
        }
        let again = train(&config, &mut model(&config, device.as_ref()), 2, 16);
        assert!(again == (losses, stored), "{kind}");
    }
}

/// If all sequences of a batch are empty, every parameter still has a gradient (of zero).
#[test]
fn a_batch_may_have_no_element_of_any_sequence() {
    let (config, empty) = (config("sgd"), batch_without_elements());
    for (name, batch) in forms_of(&empty) {
        let (mut device, cpu) = (on_device(&config), at(&config, &tables(), None));
        let before = stored(&device);
        let mut forward = device.predict(&batch).unwrap();
        assert_near(name, &forward.logits.detach(), &cpu.predict(&batch).unwrap().logits.detach());
        let loss = device.loss(&forward, &batch, Model::weight(&batch));
        device.backward(&batch, &mut forward, &loss, || Ok(())).unwrap();
        assert_gradients_of_no_elements(name, &device);
        device.update(forward, &config.optimizer.tables).unwrap();
        assert!(stored(&device) == before, "{name}: no row was looked up");
    }
}

#[test]
fn rows_of_tables_are_read_and_written() {
    let (config, tables) = (config("adagrad"), narrow_tables());
    let mut device = at(&config, &tables, Some(&emulated()));
    let mut cpu = at(&config, &tables, None);
    assert!(stored(&device) == stored(&cpu), "a device's tables begin as the CPU's");
    train(&config, &mut device, 1, 3);
    // All rows of some tables and a few rows of the others, as checkpoints access them.
    let chosen = [3, 0, 29];
    for shard in 0..tables.len() {
        for buffer in 0..2 {
            assert_eq!(device.embeddings.buffers(shard), cpu.embeddings.buffers(shard));
            let rows = if shard % 2 == 0 { RowSet::All } else { RowSet::Chosen(&chosen) };
            let mut bytes = Vec::new();
            let mut sink = |piece: &[u8]| {
                bytes.extend_from_slice(piece);
                Ok(())
            };
            device.embeddings.read(shard, buffer, rows, &mut sink).unwrap();
            let mut rest = bytes.as_slice();
            let mut source = |piece: &mut [u8]| std::io::Read::read_exact(&mut rest, piece);
            cpu.embeddings.write(shard, buffer, rows, &mut source).unwrap();
            let mut copy = Vec::new();
            let mut sink = |piece: &[u8]| {
                copy.extend_from_slice(piece);
                Ok(())
            };
            cpu.embeddings.read(shard, buffer, rows, &mut sink).unwrap();
            assert_eq!(copy, bytes, "table {shard}, buffer {buffer}");
            let mut rest = bytes.as_slice();
            let mut source = |piece: &mut [u8]| std::io::Read::read_exact(&mut rest, piece);
            let before = stored(&device);
            device.embeddings.write(shard, buffer, rows, &mut source).unwrap();
            assert!(stored(&device) == before);
        }
    }
}

#[test]
fn evaluation_needs_no_backward() {
    let config = config("sgd");
    let (device, cpu) = (on_device(&config), at(&config, &tables(), None));
    for (name, batch) in forms_of(&batch(3)) {
        let logits =
            [&device, &cpu].map(|model| tch::no_grad(|| model.predict(&batch)).unwrap().logits.detach());
        assert_near(name, &logits[0], &logits[1]);
    }
}
