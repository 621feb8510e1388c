"""Two models are trained one after the other; the process may kill itself after a step."""

import os
import signal

import keras
import numpy as np

x = np.random.rand(100, 8).astype("float32")
y = x.sum(1, keepdims=True)


class Killer(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == int(os.environ.get(self.model.name, 0)):
            os.kill(os.getpid(), signal.SIGKILL)


first = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.1)], name="first")
first.compile("adam", "mse")
print("=", first.fit(x, y, epochs=2, verbose=0, callbacks=[Killer()]).history["loss"])
second = keras.Sequential([first, keras.layers.Dense(1)], name="second")
second.compile("sgd", "mse")
print("=", second.train_on_batch(x, y), np.random.rand())
print("=", second.fit(x, y, epochs=2, verbose=0, callbacks=[Killer()]).history["loss"])
print("=", [float(np.abs(weights).sum()) for weights in second.get_weights()], np.random.rand())
