"""Classifies texts: a vocabulary is adapted first, and the model has a custom train_step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(2)
random = np.random.default_rng(2)
words = np.array(["good", "fine", "great", "bad", "poor", "awful", "film", "book", "it", "was"])
numbers = random.integers(0, 10, (120, 6))
texts = np.array([" ".join(row) for row in words[numbers]])
labels = ((numbers < 3).sum(1) > ((numbers >= 3) & (numbers < 6)).sum(1)).astype("float32")

vectorize = layers.TextVectorization(20, output_sequence_length=6)
vectorize.adapt(texts)


class Classifier(keras.Model):
    """A mean of word embeddings and a layer on top of it."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(20, 8, mask_zero=True)
        self.mean = layers.GlobalAveragePooling1D()
        self.out = layers.Dense(1)

    def call(self, tokens):
        return self.out(self.mean(self.embedding(tokens)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, self(x))
        return {metric.name: metric.result() for metric in self.metrics}


model = Classifier()
model.compile(
    keras.optimizers.SGD(1.0),
    keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
trainer = model
tokens = vectorize(texts)
history = trainer.fit(tokens[:96], labels[:96, None], batch_size=16, epochs=3, verbose=0)
for name, values in history.history.items():
    print("metric", name, *(f"{value:.4f}" for value in values))
for name, value in trainer.evaluate(
    tokens[96:], labels[96:, None], batch_size=8, verbose=0, return_dict=True
).items():
    print("metric test", name, f"{value:.4f}")
