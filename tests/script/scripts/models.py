"""Trains several models in the ways of public scripts, and prints what they compute."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.random.rand(75, 8).astype("float32")
y = (x.sum(1, keepdims=True) > 4).astype("float32")


def show(name, *values):
    print("=", name, *(np.round(np.asarray(v, "float64"), 4).tolist() for v in values))


class Watcher(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert self.model is model
        show("callback", model.predict(x[:2], verbose=0), model.evaluate(x, y, verbose=0))
        model.stop_training = epoch == 1


inputs = keras.Input((8,))
hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(16, "relu")(inputs))
model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(hidden))
optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0)
model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
predict = tf.function(lambda rows: model(rows))
show("traced before", predict(x[:2]))
history = model.fit(x, y, 32, 5, 0, [Watcher()], validation_data=(x[:50], y[:50]))
assert history is model.history
assert model.optimizer is optimizer
show("fit", *history.history.values())
show("traced before", predict(x[:2]), optimizer.iterations, len(optimizer.variables))

model.layers[1].kernel.assign(model.layers[1].kernel * 0.5)
show("batch", model.train_on_batch(x[:33], y[:33]), model.test_on_batch(x[:33], y[:33]))
show("rows", model.predict_on_batch(x[:3]), model.metrics[0].result())
model.save("model.keras")
loaded = keras.models.load_model("model.keras")
show("loaded", loaded.fit(x, y, verbose=0).history["loss"], loaded.optimizer.iterations)
model.layers[1].trainable = False
model.compile("sgd", "binary_crossentropy")
show("frozen", model.fit(x, y, verbose=0).history["loss"])
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(x))
show("gradients", [tf.norm(g) for g in tape.gradient(loss, model.trainable_variables)])


class Doubling(keras.Model):
    """Changes its data in `fit` and `evaluate`."""

    def __init__(self):
        super().__init__()
        self.dense, self.num_fits = keras.layers.Dense(1), 0

    def call(self, rows):
        return self.dense(rows)

    def fit(self, x, y, **options):
        self.num_fits += 1
        return super().fit(x * 2, y, **options)

    def evaluate(self, x=None, y=None, **options):
        return super().evaluate(x * 2, y, **options)


doubling = Doubling()
doubling.compile(keras.optimizers.SGD(0.05), "mse")
history = doubling.fit(x, y, verbose=0, validation_data=(x[:40], y[:40]))
show("overrides", *history.history.values(), doubling.num_fits)
show("overrides", doubling.evaluate(x, y, verbose=0))


class Adversarial(keras.Model):
    """Two networks with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = keras.layers.Dense(8), keras.layers.Dense(1)
        self.mean = keras.metrics.Mean("loss")

    def compile(self, one, other):
        super().compile()
        self.one, self.other = one, other

    def train_step(self, rows):
        noise = tf.zeros_like(rows) + 0.1
        for optimizer, layer, target in (
            (self.other, self.critic, 0),
            (self.one, self.generator, 1),
        ):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self.critic(self.generator(noise)) - target) ** 2)
                loss += keras.ops.mean((self.critic(rows) - 1) ** 2)
            weights = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


gan = Adversarial()
gan.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
batches = tf.data.Dataset.from_tensor_slices(x).batch(25)
show("two optimizers", gan.fit(batches, verbose=0, epochs=2).history["loss"])
show("random state", np.random.rand(), keras.random.uniform(()))
